//! What is known of code that appears during a trace.

use std::{collections::HashMap, time::Duration};

use memtrace_common::stack::{StackEnd, StackRecord, Totals};

use crate::{
    collect::modules::Modules,
    profile::{Amount, LateCode},
};

/// Times and counts of mappings that appear. Moments are nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Debug)]
pub struct Late {
    /// When the first message was sent that made memtrace look at the mappings, since it did so last.
    wanted: Option<u64>,
    /// When it looked last.
    looked: u64,
    code: LateCode,
}

impl Late {
    /// The mappings were looked at at `now`.
    pub fn new(now: u64) -> Self {
        Self { wanted: None, looked: now, code: LateCode::default() }
    }

    /// A message that was sent at `time` makes a look necessary.
    pub fn want(&mut self, time: u64) {
        self.wanted.get_or_insert(time);
    }

    /// The mappings are being looked at, at `now`: the earliest moment at which what is new can have appeared.
    pub fn look(&mut self, now: u64) -> u64 {
        let since = self.wanted.take().unwrap_or(self.looked);
        self.looked = now;
        since
    }

    /// The mappings from number `before` on appeared at `since` or later, and are in force at `now`.
    pub fn in_force(&mut self, modules: &Modules, before: usize, since: u64, now: u64) {
        let delay = Duration::from_nanos(now.saturating_sub(since));
        for mapping in modules.mappings().iter().skip(before) {
            tracing::info!("the code of {:?} is known, after at most {delay:?}", mapping.name);
            self.code.mappings += 1;
            self.code.longest = self.code.longest.max(delay);
        }
    }

    /// The mappings from number `before` on were never in force.
    pub fn too_late(&mut self, modules: &Modules, before: usize) {
        self.code.mappings += modules.mappings().len().saturating_sub(before) as u64;
    }

    /// All of it, with the stacks that end in code which was found later.
    pub fn code(
        &self,
        modules: &Modules,
        records: &HashMap<u32, StackRecord>,
        totals: impl Fn(u32) -> Option<Totals>,
    ) -> LateCode {
        let mut late = self.code;
        for (number, record) in records {
            // What is no code at all stays a mere unknown address.
            let unknown = record.end == StackEnd::UnknownCode as u8
                && record.len > 0
                && modules.contains(record.frames[0].wrapping_sub(1));
            if let Some(totals) = totals(*number).filter(|totals| unknown && totals.allocated_count > 0) {
                late.stacks += 1;
                late.allocated =
                    late.allocated.plus(Amount { bytes: totals.allocated_bytes, count: totals.allocated_count });
            }
        }
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_message_since_the_last_look_counts() {
        let mut late = Late::new(10);
        assert_eq!(late.look(20), 10, "without a message, the last look");
        late.want(25);
        late.want(28);
        assert_eq!(late.look(30), 25);
        assert_eq!(late.look(40), 30);
    }
}
