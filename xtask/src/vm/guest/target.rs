//! A busy target, whose progress and code are looked at from outside.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::workload::Workload;

/// How long the kernel may take to restore a probed process's code after the tracer's end.
const PATIENCE: Duration = Duration::from_secs(20);

/// The running fixture.
pub struct Target {
    workload: Workload,
    rounds: u64,
    code: Vec<Code>,
}

/// Code of a mapping, as it was before anybody traced.
struct Code {
    start: u64,
    bytes: Vec<u8>,
    name: String,
}

impl Target {
    pub fn start(fixture: &str) -> Result<Self> {
        let workload = Workload::start(Path::new(fixture), &["busy"])?;
        let maps = super::read(&format!("/proc/{}/maps", workload.pid()))?;
        let memory = memory(&workload)?;
        let mut code = Vec::new();
        for (start, end, name) in executable(&maps) {
            let mut bytes = vec![0; usize::try_from(end - start)?];
            memory.read_exact_at(&mut bytes, start).with_context(|| format!("code of {name}"))?;
            code.push(Code { start, bytes, name });
        }
        if !code.iter().any(|code| code.name.contains("libc.so")) {
            bail!("the target maps no C library:\n{maps}");
        }
        Ok(Self { workload, rounds: 0, code })
    }

    pub fn pid(&self) -> u32 {
        self.workload.pid()
    }

    /// It has done more since it was asked last.
    pub fn goes_on(&mut self) -> Result<()> {
        let started = Instant::now();
        loop {
            let answer = self.workload.ask("count")?;
            let rounds = answer.parse().with_context(|| format!("the target's answer {answer:?}"))?;
            if rounds > self.rounds {
                self.rounds = rounds;
                return Ok(());
            }
            if started.elapsed() > PATIENCE {
                bail!("the target has stopped after {rounds} blocks");
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// No breakpoint is left in its code.
    pub fn is_as_before(&self) -> Result<()> {
        let memory = memory(&self.workload)?;
        let started = Instant::now();
        loop {
            let changed = self.code.iter().find_map(|code| {
                let mut bytes = vec![0; code.bytes.len()];
                if let Err(error) = memory.read_exact_at(&mut bytes, code.start) {
                    return Some(format!("code of {} can't be read: {error}", code.name));
                }
                let at = bytes.iter().zip(&code.bytes).position(|(now, before)| now != before)?;
                Some(format!("{} still differs at offset {at:#x} of its code", code.name))
            });
            match changed {
                None => return Ok(()),
                Some(changed) if started.elapsed() > PATIENCE => bail!("{changed}"),
                Some(_) => thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Ends it: how many blocks it has allocated. Fails if it found one with wrong contents.
    pub fn finish(mut self) -> Result<u64> {
        self.goes_on()?;
        self.workload.finish()?;
        Ok(self.rounds)
    }
}

fn memory(workload: &Workload) -> Result<File> {
    let path = format!("/proc/{}/mem", workload.pid());
    fs::File::open(&path).context(path)
}

/// Start, end and file of the executable mappings of files in the text of `/proc/PID/maps`.
fn executable(maps: &str) -> Vec<(u64, u64, String)> {
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let (start, end) = fields.next()?.split_once('-')?;
            let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
            let executable = fields.next()?.contains('x');
            let name = fields.nth(3)?;
            (executable && name.starts_with('/')).then(|| (start, end, name.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_mappings_of_files() {
        let maps = "\
55d0c0a00000-55d0c0a01000 r--p 00000000 08:01 12 /bin/x
55d0c0a01000-55d0c0a02000 r-xp 00001000 08:01 12 /bin/x
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0 [vdso]
7f0000000000-7f0000001000 rwxp 00000000 00:00 0
";
        assert_eq!(executable(maps), [(0x55d0_c0a0_1000, 0x55d0_c0a0_2000, "/bin/x".to_owned())]);
    }
}
