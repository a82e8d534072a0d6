//! Limits of memory and processes, by control groups: version 2, or version 1 where a controller is still bound to it.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::isolation::Isolation;
use crate::process_id::ProcessId;

/// Our groups are named after the supervisor: `agl-PID-START`.
const PREFIX: &str = "agl-";
/// The stage and the first process live in the group too.
const OUR_PROCESSES: u64 = 2;
const TRIES: u32 = 50;

/// The control groups of one agent.
#[derive(Debug)]
pub struct Limits {
    groups: Vec<PathBuf>,
    /// Where the kernel counts whom it killed.
    kills: Option<PathBuf>,
}

/// One setting: which controller, and the files of its limit in the versions 2 and 1.
struct Wanted {
    controller: &'static str,
    value: u64,
    files: [&'static str; 2],
    /// Memory that is moved to the swap is memory, too; where there are such files.
    swap: Option<([&'static str; 2], [u64; 2])>,
}

impl Limits {
    /// Makes the groups that `settings` ask for; `None` where they ask for none.
    ///
    /// # Errors
    /// Why it cannot be done on this machine.
    pub fn make(settings: &Isolation) -> Result<Option<Self>, String> {
        let memory = settings.memory_limit_bytes.map(|value| Wanted {
            controller: "memory",
            value,
            files: ["memory.max", "memory.limit_in_bytes"],
            swap: Some((["memory.swap.max", "memory.memsw.limit_in_bytes"], [0, value])),
        });
        let pids = settings.pids_limit.map(|value| Wanted {
            controller: "pids",
            value: value.saturating_add(OUR_PROCESSES),
            files: ["pids.max", "pids.max"],
            swap: None,
        });
        let wanted: Vec<Wanted> = memory.into_iter().chain(pids).collect();
        if wanted.is_empty() {
            return Ok(None);
        }
        let text = |path: &str| std::fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"));
        let (mounts, own) = (text("/proc/self/mountinfo")?, text("/proc/self/cgroup")?);
        let own_id = ProcessId::own().ok_or("cannot read /proc/self/stat")?;
        let name = format!("{PREFIX}{}-{}", own_id.pid, own_id.start_time);
        let mut limits = Self { groups: Vec::new(), kills: None };
        for wanted in &wanted {
            let old = hierarchy(&mounts, &own, Some(wanted.controller));
            let version = usize::from(old.is_some());
            let (root, home) = old
                .or_else(|| hierarchy(&mounts, &own, None))
                .ok_or_else(|| format!("no control groups with the controller {} are mounted", wanted.controller))?;
            let group = limits.group(&root, &home, &name, wanted.controller, wanted.files[version])?;
            let set = |file: &str, value: u64| std::fs::write(group.join(file), value.to_string());
            set(wanted.files[version], wanted.value)
                .map_err(|error| format!("cannot write {}: {error}", wanted.files[version]))?;
            if let Some((files, values)) = wanted.swap {
                let _ = set(files[version], values[version]);
                limits.kills = Some(group.join(["memory.events", "memory.oom_control"][version]));
            }
        }
        Ok(Some(limits))
    }

    /// The group in the nearest ancestor of our own where one with the controller can be made. In version 2 that is never
    /// our own: a group with processes in it cannot give its controllers on.
    fn group(&mut self, root: &Path, home: &Path, name: &str, controller: &str, file: &str) -> Result<PathBuf, String> {
        let mut reason = String::new();
        for parent in home.ancestors().take_while(|parent| parent.starts_with(root)) {
            let group = parent.join(name);
            if self.groups.contains(&group) && group.join(file).exists() {
                return Ok(group);
            }
            sweep(parent);
            match std::fs::create_dir(&group) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => {
                    // Without the group's own name: the log says the same thing once.
                    reason = format!("in {}: {error}", parent.display());
                    continue;
                }
            }
            if !group.join(file).exists() {
                let _ = std::fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
            }
            if group.join(file).exists() {
                if !self.groups.contains(&group) {
                    self.groups.push(group.clone());
                }
                return Ok(group);
            }
            reason = format!("{} does not give its controller {controller} on", parent.display());
            if !self.groups.contains(&group) {
                let _ = std::fs::remove_dir(&group);
            }
        }
        Err(format!("no control group can be made: {reason}"))
    }

    /// Takes a process in, and with it all that it will start.
    ///
    /// # Errors
    /// What the system says.
    pub fn take_in(&self, pid: i32) -> io::Result<()> {
        self.groups.iter().try_for_each(|group| std::fs::write(group.join("cgroup.procs"), pid.to_string()))
    }

    /// Removes the groups. Nothing runs in them any more, but the kernel lets go of them a little later.
    pub async fn remove(mut self) {
        for _ in 0..TRIES {
            self.try_remove();
            if self.groups.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn try_remove(&mut self) {
        let busy = |error: io::Error| error.kind() == ErrorKind::ResourceBusy;
        self.groups.retain(|group| std::fs::remove_dir(group).is_err_and(busy));
    }

    /// Whether the kernel killed any of the group's processes for want of memory.
    #[must_use]
    pub fn out_of_memory(&self) -> bool {
        let counts = self.kills.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        // A machine that is out of memory kills too; version 2 tells whether the group was at its own limit.
        let at_its_limit = count(&counts, "oom") > 0 || !counts.lines().any(|line| line.starts_with("oom "));
        count(&counts, "oom_kill") > 0 && at_its_limit
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        // What is left here is swept by a later attempt.
        self.try_remove();
    }
}

/// Removes groups whose supervisors are gone, killed before they could do so.
fn sweep(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let numbers = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once('-'));
        let owner = numbers
            .and_then(|(pid, start)| Some(ProcessId { pid: pid.parse().ok()?, start_time: start.parse().ok()? }));
        if owner.is_some_and(|owner| !owner.is_alive()) {
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

/// Where control groups are mounted, and our own group there: those of version 1 with `controller`, or those of version 2.
fn hierarchy(mounts: &str, own: &str, controller: Option<&str>) -> Option<(PathBuf, PathBuf)> {
    let has = |list: &str| controller.is_some_and(|controller| list.split(',').any(|name| name == controller));
    let mount = mounts.lines().find_map(|line| {
        let (fields, rest) = line.split_once(" - ")?;
        let mut rest = rest.split(' ');
        let (kind, options) = (rest.next()?, rest.nth(1)?);
        let fits = if controller.is_some() { kind == "cgroup" && has(options) } else { kind == "cgroup2" };
        let mut fields = fields.split(' ').skip(3);
        fits.then_some((fields.next()?, fields.next()?))
    });
    let home = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let fits = if controller.is_some() { has(controllers) } else { controllers.is_empty() };
        fits.then_some(path)
    });
    let ((inside, root), home) = (mount?, home?);
    // In a container the mount may begin at a group of its own.
    let home = home.strip_prefix(inside.trim_end_matches('/')).unwrap_or(home);
    Some((root.into(), Path::new(root).join(home.trim_start_matches('/'))))
}

fn count(counts: &str, name: &str) -> u64 {
    let count = counts.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok());
    count.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED: &str = "30 29 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        31 29 0:27 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
        32 29 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";

    #[test]
    fn the_own_group_is_found_in_both_versions() {
        let own = "9:memory:/jobs/7\n8:cpu,cpuacct:/\n0::/user.slice/a.scope";
        let found = |controller| hierarchy(MIXED, own, controller);
        let paths = |root: &str, home: &str| Some((PathBuf::from(root), PathBuf::from(home)));
        assert_eq!(found(Some("memory")), paths("/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory/jobs/7"));
        assert_eq!(found(Some("cpuacct")), paths("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu/"));
        assert_eq!(found(None), paths("/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/user.slice/a.scope"));
        assert_eq!(found(Some("pids")), None);
        let container = "1 2 0:3 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw";
        assert_eq!(hierarchy(container, "0::/docker/abc/x", None), paths("/sys/fs/cgroup", "/sys/fs/cgroup/x"));
    }

    #[test]
    fn kills_are_counted_and_group_kills_are_not_taken_for_them() {
        let events = "low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\noom_group_kill 0\n";
        assert_eq!(count(events, "oom_kill"), 2);
        assert_eq!(count("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", "oom_kill"), 1);
        assert_eq!(count("", "oom_kill"), 0);
    }
}
