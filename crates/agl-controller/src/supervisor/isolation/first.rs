//! The first process of the namespaces: puts up the walls, starts the agent, reaps. When it ends the kernel kills all that is
//! left inside.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command as Process, Stdio};

use nix::sys::signal::SigSet;
use rustix::process::{Signal, WaitOptions, set_parent_process_death_signal, wait};

use super::words::{Inner, Mouth, Word};
use super::{ALLOCATOR, privileges, rooms};
use crate::supervisor::family::not_started;
use crate::supervisor::record::{Command, NotStarted};

/// Runs to the end of everything inside.
///
/// # Errors
/// What the system says about the socket; nobody is left to hear it.
pub fn run() -> io::Result<()> {
    let die_with_stage = || set_parent_process_death_signal(Some(Signal::KILL));
    die_with_stage()?;
    // Blocked signals would be blocked in the agent too. To the first process they mean nothing anyway.
    SigSet::empty().thread_set_mask()?;
    let mouth = Mouth::at_standard_input()?;
    mouth.say(&Word::Ready);
    let Some(Inner { rooms, mut agent }) = mouth.hear_last()? else { return Ok(()) };
    let failed = |message| {
        mouth.say(&Word::Failed(NotStarted { message, permanent: true }));
        Ok(())
    };
    // Once the rooms are arranged, a relative path would lead from where we stand, behind the walls.
    agent.cwd = std::path::absolute(&agent.cwd)?;
    let notes = match rooms::arrange(&rooms) {
        Ok(notes) => notes,
        Err(message) => return failed(message),
    };
    if let Err(message) = privileges::give_up() {
        return failed(message);
    }
    die_with_stage()?;
    // The agent runs as the same user, and must not take us over.
    nix::sys::prctl::set_dumpable(false)?;
    match start(&agent) {
        Ok(pid) => {
            mouth.say(&Word::Started { notes });
            reap(pid, &mouth);
        }
        Err(reason) => mouth.say(&Word::Failed(reason)),
    }
    Ok(())
}

fn start(agent: &Command) -> Result<i32, NotStarted> {
    let program = agent.argv.first().map(String::as_str).unwrap_or_default();
    if !agent.cwd.is_dir() {
        let message = format!(
            "cannot start {program:?}: its working directory {} does not exist inside its isolation; name it in \
             isolation.readable or isolation.writable",
            agent.cwd.display()
        );
        return Err(NotStarted { message, permanent: true });
    }
    let child = Process::new(program)
        .args(agent.argv.iter().skip(1))
        .env_remove(ALLOCATOR.0)
        .envs(&agent.env)
        .current_dir(&agent.cwd)
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|error| not_started(program, &error))?;
    Ok(i32::try_from(child.id()).unwrap_or_default())
}

/// Takes everybody's exit status, for all orphans inside are ours, until nobody is left.
fn reap(agent: i32, mouth: &Mouth) {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() == agent => {
                mouth.say(&Word::Ended { status: status.as_raw() });
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}
