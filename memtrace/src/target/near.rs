//! Names that resemble one that was not found, for the error that says so.

/// Least resemblance that is worth a suggestion, from 0 to 1.
const ALIKE: f64 = 0.6;
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
        let worst = self.found.last().filter(|_| self.found.len() >= self.most);
        let least = worst.map_or(ALIKE, |(worst, _)| worst.max(ALIKE));
        let likeness = self.likeness(name, least);
        if likeness < ALIKE || self.most == 0 || (worst.is_some() && likeness <= least) {
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

    /// 0 where it is less than `least` at first sight.
    fn likeness(&self, name: &str, least: f64) -> f64 {
        if self.wanted.is_empty() || name.is_empty() || self.wanted.len().max(name.len()) > MAX_LENGTH {
            return 0.0;
        }
        let name = name.to_lowercase();
        let contained = name.contains(&self.wanted) || (name.len() > 3 && self.wanted.contains(&name));
        if contained {
            1.0 + strsim::normalized_damerau_levenshtein(&self.wanted, &name)
        } else if at_most(&self.wanted, &name) < least {
            0.0
        } else {
            strsim::normalized_damerau_levenshtein(&self.wanted, &name)
        }
    }
}

/// What the likeness of two names cannot exceed: characters that only one of them has must be edited. Far cheaper than the
/// likeness itself, and most names can be told apart by it.
fn at_most(one: &str, other: &str) -> f64 {
    let mut counts = [0i32; 256];
    one.bytes().for_each(|byte| counts[usize::from(byte)] += 1);
    other.bytes().for_each(|byte| counts[usize::from(byte)] -= 1);
    let (only_one, only_other) =
        counts.iter().fold((0, 0), |(one, other), count| (one + (*count).max(0), other + (-*count).max(0)));
    // In bytes, of which a character has several.
    let longest = one.chars().count().max(other.chars().count()).max(1);
    let bytes = if one.is_ascii() && other.is_ascii() { 1.0 } else { 4.0 };
    1.0 - f64::from(only_one.max(only_other)) / bytes / longest as f64
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
    fn first_sight_never_says_too_little() {
        let names = ["pool_get", "pool_put", "Pool", "get_pool", "\u{e4}\u{f6}_get", "\u{1f600}", "x", "aaaaaaaa"];
        for one in names {
            for other in names {
                let likeness = strsim::normalized_damerau_levenshtein(one, other);
                assert!(at_most(one, other) >= likeness - 1e-9, "{one} {other}");
            }
        }
        assert!(at_most("pool_get", "unrelated_thing") < 0.6);
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
