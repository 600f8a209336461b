//! Names that resemble one that was not found, for the error that says so.

/// Least resemblance that is worth a suggestion, from 0 to 1.
const ALIKE: f64 = 0.5;
/// Longest name that is compared: the effort grows with the square.
const MAX_LENGTH: usize = 128;

/// The names that resemble `wanted` most, best first, at most `most`. A name that contains `wanted`, or is contained in
/// it, comes before those that are only spelt alike. `key` is the part of a candidate that is compared.
pub fn near<T>(wanted: &str, candidates: impl IntoIterator<Item = T>, key: impl Fn(&T) -> &str, most: usize) -> Vec<T> {
    let wanted = wanted.to_lowercase();
    let mut found: Vec<(f64, T)> = Vec::new();
    for candidate in candidates {
        let likeness = likeness(&wanted, &key(&candidate).to_lowercase());
        if likeness < ALIKE || found.len() == most && found.last().is_some_and(|(worst, _)| *worst >= likeness) {
            continue;
        }
        let place = found.partition_point(|(better, _)| *better >= likeness);
        found.insert(place, (likeness, candidate));
        found.truncate(most);
    }
    found.into_iter().map(|(_, candidate)| candidate).collect()
}

fn likeness(wanted: &str, name: &str) -> f64 {
    if wanted.is_empty() || name.is_empty() || wanted.len().max(name.len()) > MAX_LENGTH {
        return 0.0;
    }
    let likeness = strsim::normalized_damerau_levenshtein(wanted, name);
    if name.contains(wanted) || (name.len() > 3 && wanted.contains(name)) { likeness + 1.0 } else { likeness }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_come_first() {
        let names = ["unrelated", "nginx-worker", "nginy", "", "apache", "Nginx"];
        assert_eq!(near("nginx", names, |name| name, 3), ["Nginx", "nginx-worker", "nginy"]);
        assert_eq!(near("nginx", names, |name| name, 1), ["Nginx"]);
        assert!(near("", names, |name| name, 3).is_empty());
        assert!(near("nginx", names, |name| name, 0).is_empty());
    }
}
