//! Processes, threads or control groups ranked by what they hold, and whose a call path is.

use std::borrow::Cow;

use crate::profile::{Amount, By, Group, GroupKind, NamedProfile, NamedStack, numbered, or_no_name};

use super::{Unit, Which, share};

/// The groups of a split profile, the one that holds most first.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupTable<'a> {
    /// Sum over all rows: that of all call paths.
    pub total: Amount,
    /// Every group, those that hold nothing last.
    pub rows: Vec<GroupRow<'a>>,
}

/// One group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupRow<'a> {
    /// Its index in [`NamedProfile::groups`].
    pub index: usize,
    /// The group.
    pub group: &'a Group,
    /// What its call paths hold, or allocated.
    pub amount: Amount,
    /// Share of the total by the table's unit, from 0 to 1.
    pub share: f64,
}

/// Ranks the groups of `profile` by `unit`; equal ones by the other unit, then by name.
pub fn groups(profile: &NamedProfile, unit: Unit, which: Which) -> GroupTable<'_> {
    let mut sums = vec![Amount::default(); profile.groups.len()];
    let mut total = Amount::default();
    for stack in &profile.stacks {
        if let Some(sum) = stack.group.and_then(|group| sums.get_mut(group)) {
            *sum = sum.plus(which.of(stack));
            total = total.plus(which.of(stack));
        }
    }
    let mut rows: Vec<GroupRow<'_>> = profile
        .groups
        .iter()
        .zip(sums)
        .enumerate()
        .map(|(index, (group, amount))| GroupRow {
            index,
            group,
            amount,
            share: share(unit.of(amount), unit.of(total)),
        })
        .collect();
    rows.sort_by(|a, b| {
        unit.of(b.amount)
            .cmp(&unit.of(a.amount))
            .then_with(|| unit.other().of(b.amount).cmp(&unit.other().of(a.amount)))
            .then_with(|| a.group.label.cmp(&b.group.label))
            .then_with(|| a.index.cmp(&b.index))
    });
    GroupTable { total, rows }
}

/// What one group of a split is called, to be counted: `control group`.
pub const fn noun(by: By) -> &'static str {
    match by {
        By::None | By::Process => "process",
        By::Thread => "thread",
        By::Cgroup => "control group",
    }
}

/// The frames that stand before those of a call path where paths of all groups are in one picture, outermost first:
///
/// - not split: the command name;
/// - by process: `nginx (7)`, with the pid;
/// - by thread: the process, then `worker (9)`, with the tid;
/// - by control group: `[cgroup] /system.slice/nginx.service`, then the command name.
///
/// Names in them are not escaped.
pub fn roots<'a>(profile: &'a NamedProfile, stack: &'a NamedStack) -> Vec<Cow<'a, str>> {
    let process = |index: usize| {
        let process = &profile.processes[index];
        Cow::Owned(numbered(&process.comm, process.pid))
    };
    match stack.group.and_then(|group| profile.groups.get(group)).map(|group| &group.kind) {
        None => vec![Cow::Borrowed(&*stack.comm)],
        Some(GroupKind::Process(index)) => vec![process(*index)],
        Some(GroupKind::Thread { process: index, thread }) => {
            let thread = match thread.map(|thread| &profile.threads[thread]) {
                Some(thread) => Cow::Owned(numbered(&thread.name, thread.tid)),
                None => Cow::Borrowed("[unknown thread]"),
            };
            vec![process(*index), thread]
        }
        Some(GroupKind::Cgroup(path)) => {
            let path = match path {
                Some(path) => Cow::Owned(format!("[cgroup] {path}")),
                None => Cow::Borrowed("[unknown cgroup]"),
            };
            vec![path, Cow::Borrowed(&*stack.comm)]
        }
    }
}

/// Tells whose call paths are, for people, where that is not the same for all of a profile.
#[derive(Clone, Copy, Debug)]
pub struct Owners<'a> {
    profile: &'a NamedProfile,
    /// Whether there are several command names.
    several: bool,
}

impl<'a> Owners<'a> {
    /// Those of `profile`.
    pub fn new(profile: &'a NamedProfile) -> Self {
        let several = profile.stacks.windows(2).any(|pair| pair[0].comm != pair[1].comm);
        Self { profile, several }
    }

    /// The group of a call path, with the command name if the group does not tell that. Not escaped.
    pub fn of(self, stack: &'a NamedStack) -> Option<Cow<'a, str>> {
        match stack.group.and_then(|group| self.profile.groups.get(group)) {
            None => self.several.then_some(Cow::Borrowed(&*stack.comm)),
            Some(Group { kind: GroupKind::Cgroup(_), label }) if self.several => {
                Some(Cow::Owned(format!("{label}, {}", or_no_name(&stack.comm))))
            }
            Some(group) => Some(Cow::Borrowed(&group.label)),
        }
    }
}
