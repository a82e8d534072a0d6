//! The answer on its last steps: given to the connection, or left behind by a harness that hung up.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::recorder::Handover;

/// A response body that reports its delivery. «Delivered» means that the connection took the whole body for sending; when the
/// harness hangs up before, the body is dropped unread.
pub(crate) struct DeliveredBody {
    bytes: Option<Bytes>,
    handover: Option<Handover>,
}

impl DeliveredBody {
    pub(crate) fn new(bytes: Bytes, handover: Option<Handover>) -> Self {
        Self { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()), handover }
    }
}

impl Body for DeliveredBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = self.bytes.take();
        if let Some(handover) = self.handover.take() {
            handover.delivered();
        }
        Poll::Ready(bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}
