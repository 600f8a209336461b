//! Medians and their spread.

/// Median, lowest and highest of some measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    pub median: f64,
    pub lowest: f64,
    pub highest: f64,
}

impl Summary {
    /// `None` if there are no measurements. The median of an even number is the mean of the two in the middle.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&lowest, &highest) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Some(Self { median, lowest, highest })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn odd_even_and_none() {
        let summary = Summary::of(&[3.0, 1.0, 100.0]).unwrap();
        assert_eq!((summary.lowest, summary.median, summary.highest), (1.0, 3.0, 100.0));
        assert_eq!(Summary::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(Summary::of(&[7.0]).unwrap().median, 7.0);
        assert_eq!(Summary::of(&[]), None);
    }
}
