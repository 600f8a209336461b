//! Numbers for people.

use std::time::Duration;

/// `12.0 MiB`; below 1024 exact: `512 B`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // What would be printed as 1024.0 is 1.0 of the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `+1.2 MiB`, `-512 B`, `±0 B`.
pub fn signed_bytes(difference: i128) -> String {
    let sign = match difference {
        0 => "±",
        1.. => "+",
        _ => "-",
    };
    let magnitude = u64::try_from(difference.unsigned_abs()).unwrap_or(u64::MAX);
    format!("{sign}{}", bytes(magnitude))
}

/// `+1.2 MiB/s`; less than a byte per second is `±0 B/s`.
pub fn rate(per_second: f64) -> String {
    format!("{}/s", signed_bytes(per_second.round() as i128))
}

/// `850 ms`, `58.2 s`, `12 min 03 s`, `3 h 05 min`, `2 d 03 h`.
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let milliseconds = duration.as_millis();
    if milliseconds < 1000 {
        format!("{milliseconds} ms")
    } else if milliseconds < 59_950 {
        format!("{:.1} s", duration.as_secs_f64())
    } else if seconds < 60 {
        "1 min 00 s".into()
    } else if seconds < 3600 {
        format!("{} min {:02} s", seconds / 60, seconds % 60)
    } else if seconds < 86_400 {
        format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60)
    } else {
        format!("{} d {:02} h", seconds / 86_400, seconds / 3600 % 24)
    }
}

/// `4.2 ms`; from a second on as [`duration`].
pub fn delay(delay: Duration) -> String {
    if delay < Duration::from_secs(1) { format!("{:.1} ms", delay.as_secs_f64() * 1e3) } else { duration(delay) }
}

/// `61.5 %`; what is not nothing is never printed as nothing.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent > 0.0 && percent < 0.05 { "<0.1 %".into() } else { format!("{percent:.1} %") }
}

/// `1 block`, `2 blocks`.
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// `1 process`, `2 processes`.
pub fn counted_as(count: u64, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// Most characters of a sparkline.
const SPARKLINE: usize = 16;

/// A series as a line of bars from 0 to its largest value: `▁▂▃▄▅▆▇█`. A longer series is thinned; the last moment is
/// always shown.
pub fn sparkline(series: &[u64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let shown = series.len().min(SPARKLINE);
    let values: Vec<u64> = (1..=shown).map(|position| series[position * series.len() / shown - 1]).collect();
    let largest = values.iter().copied().max().unwrap_or(0);
    values
        .iter()
        .map(|value| match largest {
            0 => BARS[0],
            // To the nearest bar, but what is not nothing is not shown as nothing.
            _ => {
                let seventh = (*value as f64 / largest as f64 * 7.0).round() as usize;
                BARS[seventh.clamp(usize::from(*value != 0), 7)]
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(signed_bytes(0), "±0 B");
        assert_eq!(signed_bytes(-2048), "-2.0 KiB");
        assert_eq!(rate(1_258_291.2), "+1.2 MiB/s");
        assert_eq!(rate(-0.3), "±0 B/s");
        assert_eq!(rate(f64::NAN), "±0 B/s");
    }

    #[test]
    fn durations() {
        let text = |milliseconds| duration(Duration::from_millis(milliseconds));
        assert_eq!(text(0), "0 ms");
        assert_eq!(text(999), "999 ms");
        assert_eq!(text(58_249), "58.2 s");
        assert_eq!(text(59_999), "1 min 00 s");
        assert_eq!(text(723_000), "12 min 03 s");
        assert_eq!(text(11_100_000), "3 h 05 min");
        assert_eq!(text(183_600_000), "2 d 03 h");
    }

    #[test]
    fn shares() {
        assert_eq!(percent(0.0), "0.0 %");
        assert_eq!(percent(0.0001), "<0.1 %");
        assert_eq!(percent(1.0), "100.0 %");
    }

    #[test]
    fn sparklines() {
        assert_eq!(sparkline(&[]), "");
        assert_eq!(sparkline(&[0, 0]), "▁▁");
        assert_eq!(sparkline(&[0, 1, 2, 3, 4, 5, 6, 7]), "▁▂▃▄▅▆▇█");
        assert_eq!(sparkline(&[1, 1000]), "▂█");
        assert_eq!(sparkline(&[u64::MAX, u64::MAX]), "██");
        let long: Vec<u64> = (0..1000).collect();
        assert_eq!(sparkline(&long).chars().count(), SPARKLINE);
        assert!(sparkline(&long).ends_with('█'));
    }
}
