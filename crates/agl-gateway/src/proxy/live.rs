//! A connection that is told an answer while it comes: pieces, and one that is the last.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use super::deliveries::Handover;
use crate::dialect::Voice;
use crate::error::ApiError;

/// A piece of the answer.
pub(crate) enum Words {
    More(Bytes),
    /// Its end, and who is to be told that it has been delivered.
    Last(Bytes, Option<Handover>),
}

/// The connection's end of the line, before its body begins.
pub(crate) type Line = mpsc::UnboundedReceiver<Words>;

/// What a body gives of it.
pub(super) enum Heard {
    More(Bytes),
    Last(Bytes, Option<Handover>),
}

/// A body's side of the line.
pub(super) struct Listener {
    line: Line,
    voice: Voice,
    every: Duration,
    alarm: Pin<Box<Sleep>>,
}

impl Listener {
    /// A silence longer than `every` is filled with signs of life.
    pub(super) fn new(line: Line, voice: Voice, every: Duration) -> Self {
        Self { line, voice, every, alarm: Box::pin(tokio::time::sleep(every)) }
    }

    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Heard> {
        let heard = match self.line.poll_recv(context) {
            Poll::Ready(Some(Words::More(words))) => Heard::More(words),
            Poll::Ready(Some(Words::Last(words, handover))) => return Poll::Ready(Heard::Last(words, handover)),
            Poll::Ready(None) => {
                let lost = ApiError::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, "The call was lost");
                return Poll::Ready(Heard::Last(self.voice.stream_error(&lost).into(), None));
            }
            Poll::Pending => {
                std::task::ready!(self.alarm.as_mut().poll(context));
                Heard::More(self.voice.keep_alive().into())
            }
        };
        self.alarm.as_mut().reset(Instant::now() + self.every);
        Poll::Ready(heard)
    }
}
