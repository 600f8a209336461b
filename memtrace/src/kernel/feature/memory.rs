//! Whether the kernel-side tables fit into the memory that is left.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::Check;
use crate::kernel::{budget, release::Release};

/// Since this release tables are charged to the memory cgroup; before it they count against RLIMIT_MEMLOCK ("bpf: Switch
/// to memcg-based memory accounting").
const CGROUP_ACCOUNTING: Release = Release::new(5, 11);

/// Bytes of memory that this process may still use, by each limit; `None` for no limit, or none that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The machine's, without swapping.
    pub available: Option<u64>,
    /// The memory cgroup's and its parents'; what can be reclaimed at once is counted as free.
    pub cgroup: Option<u64>,
    /// RLIMIT_MEMLOCK.
    pub memlock: Option<u64>,
}

impl Limits {
    /// Those of this process.
    pub fn gather() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let groups = groups(&cgroups, &mounts);
        Self {
            available: available(&meminfo),
            cgroup: groups.iter().flat_map(Group::with_parents).filter_map(|group| group.left()).min(),
            memlock: memlock(),
        }
    }
}

/// Checks that tables of `mebibytes` MiB fit.
pub fn check(mebibytes: u32, release: Option<Release>, limits: &Limits) -> Check {
    const NAME: &str = "memory";
    const HELP: &str = "choose a smaller --memory-budget";
    let needed = u64::from(mebibytes.clamp(budget::MIN_MIB, budget::MAX_MIB)) << 20;
    if release.is_some_and(|release| release < CGROUP_ACCOUNTING)
        && let Some(memlock) = limits.memlock
        && memlock < needed
    {
        return Check::missing(
            NAME,
            format!("the limit of locked memory is {} MiB, the tables take {mebibytes} MiB", memlock >> 20),
            "ulimit -l unlimited",
        );
    }
    let left = [(limits.available, "the machine"), (limits.cgroup, "the memory cgroup")];
    let Some((left, whose)) = left.into_iter().filter_map(|(left, whose)| Some((left?, whose))).min() else {
        return Check::degraded(
            NAME,
            "it is not known how much is left (no /proc/meminfo): tables that are too large make processes be killed",
            "mount -t proc proc /proc",
        );
    };
    let text = format!("the tables take {mebibytes} MiB of the {} MiB left to {whose}", left >> 20);
    // Half of what is left, in a round number of MiB.
    let advice = (left >> 21).checked_ilog2().map(|log| 1u64 << log);
    let fix = advice.map_or_else(|| "free memory".into(), |advice| format!("{HELP}, such as {advice}"));
    if needed > left {
        Check::missing(NAME, text, fix)
    } else if needed > left / 2 {
        Check::degraded(NAME, format!("{text}: programs are left with less than half of it"), fix)
    } else {
        Check::ok(NAME, text)
    }
}

/// `MemAvailable` of `/proc/meminfo`, bytes.
fn available(meminfo: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn memlock() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the block outlives the call.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// A memory cgroup, by the directory of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    directory: PathBuf,
    /// Where its hierarchy is mounted.
    mount: PathBuf,
    /// Names of the files with its limit and its usage, and of what can be reclaimed in `memory.stat`.
    files: [&'static str; 3],
}

impl Group {
    /// It and the groups it is in, as far as they are visible.
    fn with_parents(&self) -> impl Iterator<Item = Self> {
        self.directory
            .ancestors()
            .take_while(|path| path.starts_with(&self.mount))
            .map(|path| Self { directory: path.into(), ..self.clone() })
    }

    /// Bytes left below its limit, if it has one.
    fn left(&self) -> Option<u64> {
        let [limit, usage, reclaimable] = self.files;
        let read = |name| fs::read_to_string(self.directory.join(name)).ok();
        let number = |name| read(name)?.trim().parse::<u64>().ok();
        let stat = read("memory.stat").unwrap_or_default();
        Some(left(number(limit)?, number(usage)?, &stat, reclaimable))
    }
}

/// What is left below a cgroup's limit: the kernel drops unused file pages before it enforces it.
fn left(limit: u64, usage: u64, stat: &str, reclaimable: &str) -> u64 {
    let reclaimable =
        stat.lines().find_map(|line| line.strip_prefix(reclaimable)?.strip_prefix(' ')?.parse().ok()).unwrap_or(0u64);
    limit.saturating_sub(usage.saturating_sub(reclaimable))
}

/// The memory cgroups of this process in the hierarchies of both versions, by the texts of `/proc/self/cgroup` (cgroups(7))
/// and `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
fn groups(cgroups: &str, mounts: &str) -> Vec<Group> {
    const V1: [&str; 3] = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"];
    const V2: [&str; 3] = ["memory.max", "memory.current", "inactive_file"];
    let mut groups = Vec::new();
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (kind, option, files) = match controllers {
            "" => ("cgroup2", None, V2),
            names if names.split(',').any(|name| name == "memory") => ("cgroup", Some("memory"), V1),
            _ => continue,
        };
        if let Some((root, mount)) = find_mount(mounts, kind, option) {
            // In a container the mounted part of the hierarchy may start below the root that the path is counted from.
            let path = Path::new(path).strip_prefix(root).or_else(|_| Path::new(path).strip_prefix("/"));
            let directory = path.map_or_else(|_| mount.into(), |path| Path::new(mount).join(path));
            groups.push(Group { directory, mount: mount.into(), files });
        }
    }
    groups
}

/// Root within the hierarchy and mount point of the first mount of file system `kind` with `option`.
fn find_mount<'a>(mounts: &'a str, kind: &str, option: Option<&str>) -> Option<(&'a str, &'a str)> {
    mounts.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let mut source = source.split(' ');
        if source.next()? != kind {
            return None;
        }
        if let Some(option) = option
            && !source.nth(1)?.split(',').any(|given| given == option)
        {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        Some((fields.next()?, fields.next()?))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::State;
    use super::*;

    const MIB: u64 = 1 << 20;
    const NEW: Option<Release> = Some(Release::new(6, 18));

    fn available_only(mebibytes: u64) -> Limits {
        Limits { available: Some(mebibytes * MIB), ..Limits::default() }
    }

    #[test]
    fn the_tightest_limit_decides() {
        assert_eq!(check(256, NEW, &available_only(512)).state, State::Ok);
        assert_eq!(check(256, NEW, &available_only(511)).state, State::Degraded);
        assert_eq!(check(256, NEW, &available_only(255)).state, State::Missing);
        let cgroup = Limits { cgroup: Some(100 * MIB), ..available_only(10_000) };
        let check = check(256, NEW, &cgroup);
        assert_eq!(check.state, State::Missing);
        assert!(check.detail.contains("of the 100 MiB left to the memory cgroup"), "{check:?}");
        assert_eq!(check.fix.unwrap(), "choose a smaller --memory-budget, such as 32");
    }

    #[test]
    fn hopeless_and_unknown() {
        assert_eq!(check(1, NEW, &available_only(0)).fix.unwrap(), "free memory");
        assert_eq!(check(256, NEW, &Limits::default()).state, State::Degraded);
    }

    #[test]
    fn locked_memory_counts_on_old_kernels_only() {
        let limits = Limits { memlock: Some(64 << 10), ..available_only(10_000) };
        assert_eq!(check(256, NEW, &limits).state, State::Ok);
        assert_eq!(check(256, Some(Release::new(5, 10)), &limits).fix.unwrap(), "ulimit -l unlimited");
    }

    #[test]
    fn meminfo() {
        assert_eq!(available("MemTotal: 5 kB\nMemAvailable:   23999488 kB\n"), Some(23_999_488 << 10));
        assert_eq!(available("MemAvailable: x kB\n"), None);
        assert_eq!(available("MemAvailable: 18446744073709551615 kB\n"), None);
        assert_eq!(available(""), None);
    }

    #[test]
    fn groups_of_both_versions() {
        let mounts = "\
            30 20 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
            31 20 0:27 / /sys/fs/cgroup/memory rw,nosuid shared:5 - cgroup cgroup rw,memory\n\
            32 20 0:28 /box /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = groups("9:name=systemd:/\n4:memory:/a/b\n0::/box/c\n", mounts);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].directory, Path::new("/sys/fs/cgroup/memory/a/b"));
        assert_eq!(found[1].directory, Path::new("/sys/fs/cgroup/unified/c"));
        let parents: Vec<_> = found[0].with_parents().map(|group| group.directory).collect();
        let expected = ["/sys/fs/cgroup/memory/a/b", "/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory"];
        assert_eq!(parents, expected.map(PathBuf::from));
        assert_eq!(groups("0::/\n", "x\n - \n"), []);
        assert_eq!(groups("x\n0:\n", mounts), []);
    }

    #[test]
    fn reclaimable_pages_count_as_free() {
        let stat = "inactive_anon 5\ninactive_file 30\n";
        assert_eq!(left(100, 60, stat, "inactive_file"), 70);
        assert_eq!(left(100, 20, stat, "inactive_file"), 100);
        assert_eq!(left(100, 160, "", "inactive_file"), 0);
    }
}
