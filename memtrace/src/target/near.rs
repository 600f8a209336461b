//! Names that resemble one that was not found, for the error that says so.

/// Least resemblance that is worth a suggestion, from 0 to 1.
const ALIKE: f64 = 0.5;
/// Longest name that is compared: the effort grows with the square.
const MAX_LENGTH: usize = 128;

/// The names that resemble one most. A name that contains it, or is contained in it, comes before those that are only
/// spelt alike.
pub struct Nearest<T> {
    wanted: String,
    most: usize,
    /// The best first.
    found: Vec<(f64, T)>,
}

impl<T: PartialEq> Nearest<T> {
    /// Keeps at most `most` names that resemble `wanted`.
    pub fn new(wanted: &str, most: usize) -> Self {
        Self { wanted: wanted.to_lowercase(), most, found: Vec::new() }
    }

    /// Offers what is called `name`; `make` is asked for it if it is one of the best.
    pub fn offer(&mut self, name: &str, make: impl FnOnce() -> T) {
        let likeness = self.likeness(name);
        let worst = self.found.last().filter(|_| self.found.len() >= self.most);
        if likeness < ALIKE || self.most == 0 || worst.is_some_and(|(worst, _)| *worst >= likeness) {
            return;
        }
        let made = make();
        if self.found.iter().any(|(_, known)| *known == made) {
            return;
        }
        let place = self.found.partition_point(|(better, _)| *better >= likeness);
        self.found.insert(place, (likeness, made));
        self.found.truncate(self.most);
    }

    /// The best of those that were offered, best first.
    pub fn best(self) -> Vec<T> {
        self.found.into_iter().map(|(_, made)| made).collect()
    }

    fn likeness(&self, name: &str) -> f64 {
        if self.wanted.is_empty() || name.is_empty() || self.wanted.len().max(name.len()) > MAX_LENGTH {
            return 0.0;
        }
        let name = name.to_lowercase();
        let likeness = strsim::normalized_damerau_levenshtein(&self.wanted, &name);
        let contained = name.contains(&self.wanted) || (name.len() > 3 && self.wanted.contains(&name));
        if contained { likeness + 1.0 } else { likeness }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(wanted: &str, most: usize) -> Vec<&'static str> {
        let mut nearest = Nearest::new(wanted, most);
        for name in ["unrelated", "nginx-worker", "nginy", "", "apache", "Nginx", "Nginx"] {
            nearest.offer(name, || name);
        }
        nearest.best()
    }

    #[test]
    fn the_nearest_come_first() {
        assert_eq!(near("nginx", 3), ["Nginx", "nginx-worker", "nginy"]);
        assert_eq!(near("nginx", 1), ["Nginx"]);
        assert!(near("", 3).is_empty());
        assert!(near("nginx", 0).is_empty());
        assert!(near(&"n".repeat(1000), 3).is_empty());
    }
}
