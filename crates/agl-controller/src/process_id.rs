//! A process that cannot be mistaken for a later one of the same number.

use std::collections::HashMap;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// A process by its number and the time of its start, so that a number that has been given to another process since is
/// not taken for this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: i32,
    /// When it started, in clock ticks since the boot, as `/proc` tells it.
    pub start_time: u64,
}

impl ProcessId {
    /// The process that has this number now; `None` where there is none.
    #[must_use]
    pub fn of(pid: i32) -> Option<Self> {
        Some(Self { pid, start_time: Stat::read(pid)?.start_time })
    }

    /// This process.
    #[must_use]
    pub fn own() -> Option<Self> {
        Self::of(Pid::this().as_raw())
    }

    /// True while it runs; a zombie does not.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        Stat::read(self.pid).is_some_and(|stat| stat.start_time == self.start_time && !stat.is_dead())
    }

    /// Sends a signal to it, if it is still the same.
    pub fn signal(&self, signal: Signal) {
        if self.is_alive() {
            let _ = kill(Pid::from_raw(self.pid), signal);
        }
    }

    /// Sends a signal to the group that it leads. Its number cannot have been given away while the group has members.
    pub fn signal_group(&self, signal: Signal) {
        let same = Stat::read(self.pid).is_none_or(|stat| stat.start_time == self.start_time);
        if same {
            let _ = killpg(Pid::from_raw(self.pid), signal);
        }
    }
}

/// All processes below `root`, its children first, without zombies.
#[must_use]
pub fn descendants(root: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<(i32, bool)>> = HashMap::new();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    for pid in entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()) {
        if let Some(stat) = Stat::read(pid) {
            children.entry(stat.parent).or_default().push((pid, stat.is_dead()));
        }
    }
    let mut found = Vec::new();
    let mut unseen = vec![root];
    while let Some(parent) = unseen.pop() {
        for (pid, dead) in children.remove(&parent).unwrap_or_default() {
            unseen.push(pid);
            if !dead {
                found.push(pid);
            }
        }
    }
    found
}

/// The fields of `/proc/PID/stat` that we need.
struct Stat {
    state: char,
    parent: i32,
    start_time: u64,
}

impl Stat {
    fn read(pid: i32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// The second field is the program's name in parentheses, and may itself hold blanks and parentheses.
    fn parse(line: &str) -> Option<Self> {
        let (_, rest) = line.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        Some(Self {
            state: fields.first()?.chars().next()?,
            parent: fields.get(1)?.parse().ok()?,
            start_time: fields.get(19)?.parse().ok()?,
        })
    }

    fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_parentheses_and_blanks_does_not_confuse() {
        let line = "42 (a) b (c) S 7 42 42 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2";
        let stat = Stat::parse(line).unwrap();
        assert_eq!((stat.state, stat.parent, stat.start_time), ('S', 7, 98765));
    }

    #[test]
    fn a_number_that_was_given_to_another_process_is_not_the_same_process() {
        let own = ProcessId::own().unwrap();
        assert!(own.is_alive());
        assert!(!ProcessId { start_time: own.start_time + 1, ..own }.is_alive());
    }

    #[test]
    fn grandchildren_are_descendants_and_zombies_are_not_alive() {
        let mut child = std::process::Command::new("sh").args(["-c", "sleep 30 & wait"]).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let mut below = Vec::new();
        for _ in 0..500 {
            below = descendants(pid);
            if !below.is_empty() {
                break;
            }
            std::thread::yield_now();
            let _ = std::process::Command::new("true").status();
        }
        assert_eq!(below.len(), 1);
        assert!(descendants(Pid::this().as_raw()).contains(&pid));
        let id = ProcessId::of(pid).unwrap();
        child.kill().unwrap();
        let _ = kill(Pid::from_raw(below[0]), Signal::SIGKILL);
        while id.is_alive() {
            let _ = std::process::Command::new("true").status();
        }
        child.wait().unwrap();
        assert_eq!(ProcessId::of(pid), None);
    }
}
