//! The stage: makes the namespaces and starts their first process, then waits. It stays outside the new process namespace,
//! where the agent cannot see it, and everything inside dies with it.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::SigSet;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};
use rustix::process::{Signal, getgid, getuid, set_parent_process_death_signal};

use super::privileges;
use super::words::{Mouth, Outer, Word};
use crate::isolation::{GATEWAY_PORT, PROXY_PORT};
use crate::supervisor::record::NotStarted;

/// How many user namespaces may be made inside.
const NESTED: &str = "/proc/sys/user/max_user_namespaces";

/// Runs the stage to the end of everything inside.
///
/// # Errors
/// What the system says about the socket; nobody is left to hear it.
pub fn run() -> io::Result<()> {
    close_inherited()?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The supervisor's SIGTERM to our group is for the agent; we end after it.
    SigSet::all().thread_block()?;
    let mouth = Mouth::at_standard_input()?;
    let Some(outer) = mouth.hear::<Outer>()? else { return Ok(()) };
    match open(&mouth, &outer) {
        Ok(mut first) => first.wait().map(drop),
        Err(message) => {
            mouth.say(&Word::Failed(NotStarted { message, permanent: true }));
            Ok(())
        }
    }
}

/// Whoever started the controller may have left files open for its children: a folder among them would lead out of the
/// agent's mount namespace, a socket out of its network.
fn close_inherited() -> io::Result<()> {
    let name = |entry: io::Result<std::fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse::<i32>().ok();
    let open: Vec<i32> = std::fs::read_dir("/proc/self/fd")?.filter_map(name).filter(|number| *number > 2).collect();
    for number in open {
        // The one through which we have just looked is closed already.
        let _ = nix::unistd::close(number);
    }
    Ok(())
}

fn open(mouth: &Mouth, outer: &Outer) -> Result<std::process::Child, String> {
    make_namespaces()?;
    let fault = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    // Counts for this namespace and all below it.
    let forbidden = if outer.nested_namespaces { Ok(()) } else { std::fs::write(NESTED, "0") };
    loopback_up().map_err(fault("cannot bring its loopback device up"))?;
    let listen =
        |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(fault("cannot listen on its loopback address"));
    let (gateway, proxy) = (listen(GATEWAY_PORT)?, listen(PROXY_PORT)?);
    mouth.hand_out([&gateway, &proxy]).map_err(fault("cannot hand its listeners out"))?;
    if let Err(error) = forbidden {
        mouth.say(&Word::Lacks(format!(
            "isolated agents can make user namespaces of their own, if the kernel lets them: {NESTED} cannot be written ({error})"
        )));
    }
    privileges::hand_on()?;
    Command::new("/proc/self/exe")
        .arg0("agl")
        .args(["isolate", super::FIRST])
        .spawn()
        .map_err(fault("cannot start the first process of its namespaces"))
}

/// A user namespace first, which owns the others: it needs no privilege, and root's powers inside are none outside.
fn make_namespaces() -> Result<(), String> {
    let (user, group) = (getuid().as_raw(), getgid().as_raw());
    let all = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS;
    unshare(all).map_err(|error| {
        format!(
            "this machine does not let it make namespaces: {error}; see the sysctls user.max_user_namespaces, \
             kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns, or the seccomp profile \
             of the container that the controller runs in"
        )
    })?;
    // The change of credentials may have cleared it.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| error.to_string())?;
    for (file, content) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("{user} {user} 1")),
        ("gid_map", format!("{group} {group} 1")),
    ] {
        std::fs::write(format!("/proc/self/{file}"), content)
            .map_err(|error| format!("cannot write {file} of its user namespace: {error}"))?;
    }
    Ok(())
}

/// `ip link set lo up`, as the message that it is.
fn loopback_up() -> io::Result<()> {
    const NEW_LINK: u16 = 16;
    const REQUEST_AND_ACKNOWLEDGE: u16 = 1 | 4;
    const LOOPBACK: i32 = 1;
    const UP: u32 = 1;
    const LENGTH: u32 = 32;
    let mut message = Vec::new();
    message.extend(LENGTH.to_ne_bytes());
    message.extend(NEW_LINK.to_ne_bytes());
    message.extend(REQUEST_AND_ACKNOWLEDGE.to_ne_bytes());
    // Sequence number, port; then family, padding and type of device.
    message.extend([0; 12]);
    message.extend(LOOPBACK.to_ne_bytes());
    // Flags, and which of them change.
    message.extend(UP.to_ne_bytes());
    message.extend(UP.to_ne_bytes());
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    send(&socket, &message, SendFlags::empty())?;
    let mut answer = [0; 256];
    recv(&socket, &mut answer[..], RecvFlags::empty())?;
    // After the header of 16 bytes: an error number, negative, or 0.
    let error = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-error)) }
}
