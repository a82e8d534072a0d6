//! What supervisor, stage and first process say to each other: one line each, over one socket.
//!
//! ```text
//! supervisor                     stage                          first process of the namespaces
//!   ── Outer ───────────────────▶ makes the namespaces
//!   ◀─────────── two listeners ── starts the first process ─────▶
//!   ◀──────────────────────────────────────────────────── Ready ──
//!   ── Inner ────────────────────────────────────────────────────▶ puts up the walls, starts the agent
//!   ◀───────────────────────────────────────── Started or Failed ──
//!   ◀──────────────────────────────────────────────────── Ended ──
//! ```
//!
//! The supervisor's death closes the socket, and whoever waits for a word then ends; after `Inner` nobody waits, and the
//! kernel kills them by parent-death signals.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as Socket;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Interest, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::rooms::Rooms;
use crate::supervisor::record::{Command, NotStarted};

/// What the stage has to know.
#[derive(Debug, Serialize, Deserialize)]
pub struct Outer {
    /// Processes inside may make user namespaces.
    pub nested_namespaces: bool,
}

/// What the first process has to know.
#[derive(Debug, Serialize, Deserialize)]
pub struct Inner {
    /// What is there inside.
    pub rooms: Rooms,
    /// The agent.
    pub agent: Command,
}

/// What comes back.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// What could not be had on this machine and is no reason to give up, for a person.
    Lacks(String),
    /// The first process runs.
    Ready,
    /// The agent runs.
    Started {
        /// As [`Word::Lacks`].
        notes: Vec<String>,
    },
    /// It does not, and will not.
    Failed(NotStarted),
    /// The agent itself has ended. What it left behind may still run.
    Ended {
        /// As `wait` gives it.
        status: i32,
    },
}

/// Stands before the listeners; every other message begins with a brace or a quotation mark.
const LISTENERS: u8 = b'L';

/// The inner end: standard input.
pub struct Mouth {
    socket: Socket,
}

impl Mouth {
    /// The socket that is our standard input.
    ///
    /// # Errors
    /// What the system says.
    pub fn at_standard_input() -> io::Result<Self> {
        Ok(Self { socket: Socket::from(io::stdin().as_fd().try_clone_to_owned()?) })
    }

    /// Says a word. Nobody may listen any more.
    pub fn say(&self, word: &Word) {
        if let Ok(mut line) = serde_json::to_vec(word) {
            line.push(b'\n');
            let _ = (&self.socket).write_all(&line);
        }
    }

    /// Hears a line, and takes nothing beyond it: the next is for another process. `None` where the supervisor is gone.
    ///
    /// # Errors
    /// What the system says, or a line that makes no sense.
    pub fn hear<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let mut line = Vec::new();
        for byte in io::BufReader::with_capacity(1, &self.socket).bytes() {
            match byte? {
                b'\n' => return Ok(Some(serde_json::from_slice(&line)?)),
                byte => line.push(byte),
            }
        }
        Ok(None)
    }

    /// Hears the last line.
    ///
    /// # Errors
    /// What the system says, or a line that makes no sense.
    pub fn hear_last<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(&self.socket), &mut line)?;
        if line.ends_with('\n') { Ok(Some(serde_json::from_str(&line)?)) } else { Ok(None) }
    }

    /// Hands the listeners out of the network namespace.
    ///
    /// # Errors
    /// What the system says.
    pub fn hand_out(&self, listeners: [&TcpListener; 2]) -> io::Result<()> {
        let fds = listeners.map(AsFd::as_fd);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&self.socket, &[IoSlice::new(&[LISTENERS])], &mut control, SendFlags::empty())?;
        Ok(())
    }
}

/// The outer end.
pub struct Ear {
    lines: Lines<BufReader<OwnedReadHalf>>,
    mouth: OwnedWriteHalf,
    status: Option<ExitStatus>,
}

impl Ear {
    /// Takes the listeners, and with them the socket into use; or hears why there are none.
    ///
    /// # Errors
    /// Why the namespaces could not be made.
    pub async fn at(mut socket: UnixStream, outer: &Outer) -> Result<(Self, [TcpListener; 2]), NotStarted> {
        let broken = |error: io::Error| passing(format!("the stage does not answer: {error}"));
        say(&mut socket, outer).await.map_err(broken)?;
        let mut first = [0];
        let received = socket.async_io(Interest::READABLE, || receive(&socket, &mut first)).await.map_err(broken)?;
        let (reader, mouth) = socket.into_split();
        let mut ear = Self { lines: BufReader::new(reader).lines(), mouth, status: None };
        match (first[0], <[OwnedFd; 2]>::try_from(received)) {
            (LISTENERS, Ok(listeners)) => Ok((ear, listeners.map(TcpListener::from))),
            (0, _) => Err(passing("the stage ended without a word".to_owned())),
            (first, _) => {
                let rest = ear.lines.next_line().await.map_err(broken)?.unwrap_or_default();
                let line = char::from(first).to_string() + &rest;
                match serde_json::from_str(&line) {
                    Ok(Word::Failed(reason)) => Err(reason),
                    _ => Err(passing(format!("the stage said {line:?}"))),
                }
            }
        }
    }

    /// Says what the first process waits for.
    ///
    /// # Errors
    /// What the system says.
    pub async fn say(&mut self, words: &impl Serialize) -> io::Result<()> {
        say(&mut self.mouth, words).await
    }

    /// Hears the next word; `None` where nobody is left to say one. May be dropped and called again.
    pub async fn hear(&mut self) -> Option<Word> {
        let line = self.lines.next_line().await.ok()??;
        serde_json::from_str(&line).ok()
    }

    /// Waits until the agent itself has ended; false where all inside ended without saying so.
    pub async fn agent_ended(&mut self) -> bool {
        while self.status.is_none() {
            match self.hear().await {
                Some(Word::Ended { status }) => self.status = Some(ExitStatus::from_raw(status)),
                Some(_) => {}
                None => return false,
            }
        }
        true
    }

    /// How the agent ended, if that was said.
    #[must_use]
    pub fn status(&self) -> Option<ExitStatus> {
        self.status
    }
}

/// What another attempt may find better.
pub fn passing(message: String) -> NotStarted {
    NotStarted { message, permanent: false }
}

async fn say(socket: &mut (impl AsyncWriteExt + Unpin), words: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(words)?;
    line.push(b'\n');
    socket.write_all(&line).await
}

fn receive(socket: &UnixStream, first: &mut [u8; 1]) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(first)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut received = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            received.extend(fds);
        }
    }
    Ok(received)
}
