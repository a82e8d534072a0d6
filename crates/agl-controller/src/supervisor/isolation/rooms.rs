//! What an agent finds of the file system: everything read-only, some of it empty, and a few places of its own.
//!
//! What is to stay is cloned away first (`open_tree`); then every mount becomes read-only and what is hidden is covered;
//! then the clones are put back. The mounts are ours alone: the machine sees nothing of it.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, StatVfsMountFlags, statvfs};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_bind_recursive, mount_change,
    mount_remount, move_mount, open_tree,
};
use serde::{Deserialize, Serialize};

use crate::isolation::{HOME, Isolation};
use crate::work_dir::AttemptDir;

/// What there is inside.
#[derive(Debug, Serialize, Deserialize)]
pub struct Rooms {
    work: PathBuf,
    input: PathBuf,
    writable: Vec<PathBuf>,
    readable: Vec<PathBuf>,
    hidden: Vec<PathBuf>,
    tmp_limit_bytes: u64,
}

const HARMLESS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);
/// Devices that give nothing away.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// Through these, root could change the machine even without any capability.
const READ_ONLY_PROC: [&str; 7] = ["sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi"];
const HIDDEN_PROC: [&str; 6] = ["kcore", "keys", "key-users", "latency_stats", "timer_list", "sched_debug"];

impl Rooms {
    /// The rooms of an attempt: all the controller's folders are hidden but its own.
    pub fn of(settings: &Isolation, dir: &AttemptDir) -> Self {
        let mut hidden = settings.hidden.clone();
        // WORK_DIR/rollouts/ROLLOUT/ATTEMPT
        hidden.extend(dir.path().ancestors().nth(3).map(Path::to_owned));
        Self {
            work: dir.work(),
            input: dir.input(),
            writable: settings.writable.clone(),
            readable: settings.readable.clone(),
            hidden,
            tmp_limit_bytes: settings.tmp_limit_bytes,
        }
    }
}

/// A place that stays visible, while it is away.
struct Kept {
    tree: OwnedFd,
    path: PathBuf,
    is_dir: bool,
    access: Access,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    /// As it was, devices and all.
    Device,
}

/// Arranges everything in a mount namespace of this process. What could not be had comes back as notes.
///
/// # Errors
/// What could not be done, for a person.
pub fn arrange(rooms: &Rooms) -> Result<Vec<String>, String> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)
        .map_err(|error| format!("cannot make a mount namespace: {error}"))?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).map_err(|error| {
        format!(
            "cannot change its mounts: {error}; if this is Ubuntu, see the sysctl \
             kernel.apparmor_restrict_unprivileged_userns"
        )
    })?;
    let kept = keep(rooms)?;
    let devices = DEVICES.iter().map(|name| Path::new("/dev").join(name)).filter(|path| path.exists());
    let devices: Vec<Kept> = devices.map(|path| Kept::take(path, Access::Device)).collect::<Result<_, _>>()?;
    let covers = covers(rooms);

    let mut notes = Vec::new();
    let own_proc = mount("proc", "/proc", "proc", HARMLESS | MountFlags::NOEXEC, None);
    if let Err(error) = own_proc {
        notes.push(format!(
            "/proc cannot be mounted anew ({error}), as in a container that hides parts of its own: agents see in it the \
             names of the machine's processes, though they cannot reach them"
        ));
    }
    restrict(Path::new("/"), Access::Read, own_proc.is_ok().then_some(Path::new("/proc")))?;
    if !statvfs("/").is_ok_and(|root| root.f_flag.contains(StatVfsMountFlags::RDONLY)) {
        return Err("cannot make / read-only".to_owned());
    }
    furnish_dev(&devices, rooms.tmp_limit_bytes)?;
    let mut to_close = vec![Path::new("/dev")];
    // Folders before what lies in them: whoever names a path more closely is right.
    let mut places: Vec<Place> = covers.iter().map(Place::Empty).chain(kept.iter().map(Place::Kept)).collect();
    places.sort_by_key(|place| place.path().components().count());
    for place in places {
        match place {
            Place::Kept(kept) => kept.put_back()?,
            Place::Empty(cover) => {
                if cover.put(rooms.tmp_limit_bytes)? && cover.is_dir && !cover.own {
                    to_close.push(&cover.path);
                }
            }
        }
    }
    std::fs::create_dir_all(HOME).map_err(|error| format!("cannot make {HOME}: {error}"))?;
    for path in to_close {
        mount_remount(path, MountFlags::BIND | MountFlags::RDONLY | HARMLESS, "").map_err(fault("close", path))?;
    }
    if own_proc.is_ok() {
        guard_proc()?;
    }
    std::env::set_current_dir("/").map_err(|error| error.to_string())?;
    Ok(notes)
}

/// One place where the agent finds something else than the machine has there.
enum Place<'a> {
    Empty(&'a Cover),
    Kept(&'a Kept),
}

impl Place<'_> {
    fn path(&self) -> &Path {
        match self {
            Self::Empty(cover) => &cover.path,
            Self::Kept(kept) => &kept.path,
        }
    }
}

fn keep(rooms: &Rooms) -> Result<Vec<Kept>, String> {
    let mut kept = Vec::new();
    for (paths, setting, access) in
        [(&rooms.readable, "readable", Access::Read), (&rooms.writable, "writable", Access::Write)]
    {
        for path in paths {
            let path = at_home(path);
            let path =
                path.canonicalize().map_err(|error| format!("isolation.{setting} = {}: {error}", path.display()))?;
            let is_device = path.starts_with("/dev") && access == Access::Write;
            kept.push(Kept::take(path, if is_device { Access::Device } else { access })?);
        }
    }
    kept.push(Kept::take(rooms.work.clone(), Access::Write)?);
    kept.push(Kept::take(rooms.input.clone(), Access::Read)?);
    Ok(kept)
}

impl Kept {
    fn take(path: PathBuf, access: Access) -> Result<Self, String> {
        let is_dir = path.is_dir();
        let how = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
        let tree = open_tree(CWD, &path, how).map_err(fault("keep", &path))?;
        Ok(Self { tree, path, is_dir, access })
    }

    fn put_back(&self) -> Result<(), String> {
        self.put_at(&self.path)?;
        if self.access == Access::Device { Ok(()) } else { restrict(&self.path, self.access, None) }
    }

    fn put_at(&self, path: &Path) -> Result<(), String> {
        if !path.exists() {
            let folder = if self.is_dir { Some(path) } else { path.parent() };
            folder
                .map_or(Ok(()), std::fs::create_dir_all)
                .and_then(|()| if self.is_dir { Ok(()) } else { std::fs::File::create(path).map(drop) })
                .map_err(|error| format!("cannot make a place for {}: {error}", path.display()))?;
        }
        move_mount(&self.tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(fault("put back", path))
    }
}

/// Something empty over what is there.
struct Cover {
    path: PathBuf,
    is_dir: bool,
    /// The agent may write there.
    own: bool,
}

fn covers(rooms: &Rooms) -> Vec<Cover> {
    let own = ["/tmp", "/var/tmp"].map(|path| (PathBuf::from(path), true));
    // Sockets of services: a read-only mount does not keep anybody from connecting to them.
    let closed = ["/run", "/var/run"].map(|path| (PathBuf::from(path), false));
    let hidden = rooms.hidden.iter().map(|path| (at_home(path), false));
    let mut covers: Vec<Cover> = Vec::new();
    for (path, own) in own.into_iter().chain(closed).chain(hidden) {
        let Ok(path) = path.canonicalize() else { continue };
        if !covers.iter().any(|cover| cover.path == path) {
            covers.push(Cover { is_dir: path.is_dir(), path, own });
        }
    }
    covers
}

impl Cover {
    /// False where it need not be put: it lies below another cover.
    fn put(&self, limit: u64) -> Result<bool, String> {
        match self.path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            _ if self.is_dir => empty_folder(&self.path, limit, if self.own { "1777" } else { "0755" })?,
            _ => Kept::take("/dev/null".into(), Access::Device)?.put_at(&self.path)?,
        }
        Ok(true)
    }
}

fn empty_folder(path: &Path, limit: u64, mode: &str) -> Result<(), String> {
    let options = CString::new(format!("size={limit},mode={mode}")).map_err(|error| error.to_string())?;
    mount("tmpfs", path, "tmpfs", HARMLESS, Some(options.as_c_str())).map_err(fault("cover", path))
}

/// A `/dev` of its own: on the machine's, root could write to disks, which no read-only mount prevents.
fn furnish_dev(devices: &[Kept], limit: u64) -> Result<(), String> {
    let dev = Path::new("/dev");
    empty_folder(dev, limit, "0755")?;
    for device in devices {
        device.put_at(&device.path)?;
    }
    let made = |name: &str| {
        let path = dev.join(name);
        std::fs::create_dir(&path).map(|()| path).map_err(|error| format!("cannot make /dev/{name}: {error}"))
    };
    empty_folder(&made("shm")?, limit, "1777")?;
    let terminals = made("pts")?;
    let options = CString::new("newinstance,ptmxmode=0666,mode=0620").map_err(|error| error.to_string())?;
    let harmless = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount("devpts", &terminals, "devpts", harmless, Some(options.as_c_str())).map_err(fault("mount", &terminals))?;
    for (link, target) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        std::os::unix::fs::symlink(target, dev.join(link))
            .map_err(|error| format!("cannot make /dev/{link}: {error}"))?;
    }
    Ok(())
}

fn guard_proc() -> Result<(), String> {
    for name in READ_ONLY_PROC {
        let path = Path::new("/proc").join(name);
        if path.exists() {
            mount_bind_recursive(&path, &path).map_err(fault("guard", &path))?;
            let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOEXEC | HARMLESS;
            mount_remount(&path, flags, "").map_err(fault("guard", &path))?;
        }
    }
    for name in HIDDEN_PROC {
        let path = Path::new("/proc").join(name);
        if path.exists() {
            Kept::take("/dev/null".into(), Access::Device)?.put_at(&path)?;
        }
    }
    Ok(())
}

/// Sets the access of every mount at `root` or below it, but for one.
fn restrict(root: &Path, access: Access, but: Option<&Path>) -> Result<(), String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")
        .map_err(|error| format!("cannot read /proc/self/mountinfo: {error}"))?;
    for path in mounts.lines().filter_map(mount_point) {
        if path.starts_with(root) && !but.is_some_and(|but| path.starts_with(but)) {
            restrict_one(&path, access)?;
        }
    }
    Ok(())
}

fn restrict_one(path: &Path, access: Access) -> Result<(), String> {
    let unreachable = [Errno::NOENT, Errno::ACCESS, Errno::NOTDIR, Errno::LOOP, Errno::STALE];
    let held = match statvfs(path) {
        Ok(filesystem) => filesystem.f_flag,
        Err(error) if unreachable.contains(&error) => return Ok(()),
        Err(error) => return Err(fault("look at", path)(error)),
    };
    // A user namespace may not take away what was set outside. Times of access stay as they are where none is named.
    let mut flags = MountFlags::BIND | HARMLESS;
    flags.set(MountFlags::NOEXEC, held.contains(StatVfsMountFlags::NOEXEC));
    flags.set(MountFlags::RDONLY, access == Access::Read || held.contains(StatVfsMountFlags::RDONLY));
    match mount_remount(path, flags, "") {
        // Not the root of a mount: another mount lies over it, and nobody reaches it by this name.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) if unreachable.contains(&error) => Ok(()),
        Err(error) => Err(fault("restrict", path)(error)),
    }
}

/// The fifth field of a line of `mountinfo`, where blanks and the like are written as octal numbers.
fn mount_point(line: &str) -> Option<PathBuf> {
    let mut path = line.split(' ').nth(4)?.to_owned();
    for (written, meant) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        path = path.replace(written, meant);
    }
    Some(path.into())
}

/// `~/` is the home of the controller's user.
fn at_home(path: &Path) -> PathBuf {
    match (path.strip_prefix("~"), std::env::var_os("HOME")) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.to_owned(),
    }
}

fn fault(what: &'static str, path: &Path) -> impl FnOnce(Errno) -> String {
    let path = path.display().to_string();
    move |error| format!("cannot {what} {path}: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_with_blanks_are_read() {
        let line = r"36 35 98:0 / /mnt/two\040words rw,noatime master:1 - ext3 /dev/root rw";
        assert_eq!(mount_point(line), Some(PathBuf::from("/mnt/two words")));
        assert_eq!(mount_point(""), None);
    }
}
