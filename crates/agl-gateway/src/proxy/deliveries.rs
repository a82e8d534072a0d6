//! Whether recorded answers reached their harness: told by whoever gives them, noted in the trees, written a little later.

use std::sync::Weak;
use std::time::Duration;

use agl_core::trajectory::Delivery;
use agl_store::Settlement;
use tokio::sync::{mpsc, oneshot};

use super::attempt_tree::Recorded;
use super::recorder::{AttemptKey, Recorder, loaded};

/// Deliveries are written together, so that they cost no commit of their own.
pub(super) const SETTLE_EVERY: Duration = Duration::from_millis(50);
/// At most so many, since calls wait for their commit meanwhile.
const SETTLE_TOGETHER: usize = 256;

/// A recorded answer on its way to the harness. Dropped before [`Handover::delivered`], it says that the harness hung up.
pub(crate) struct Handover {
    parcel: Option<Settled>,
    outbox: mpsc::UnboundedSender<Parcel>,
}

pub(super) struct Settled {
    key: AttemptKey,
    seqs: Vec<u64>,
    digest: [u8; 32],
    delivery: Delivery,
    /// The tree has the answer as undelivered: it was given to a harness that asked again.
    again: bool,
}

pub(super) enum Parcel {
    Settled(Settled),
    /// Answered once everything sent before is written.
    Flush(oneshot::Sender<()>),
}

impl Handover {
    /// The answer has been given to the connection.
    pub(crate) fn delivered(mut self) {
        if let Some(parcel) = &mut self.parcel {
            parcel.delivery = Delivery::Delivered;
        }
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        if let Some(parcel) = self.parcel.take() {
            // Fails only when the gateway has stopped: the row then stays unsettled, which a retry after the restart respects.
            let _stopped = self.outbox.send(Parcel::Settled(parcel));
        }
    }
}

/// Notes in the trees at once who hung up, and writes all deliveries a little later, together.
pub(super) async fn settle_deliveries(recorder: Weak<Recorder>, mut inbox: mpsc::UnboundedReceiver<Parcel>) {
    while let Some(first) = inbox.recv().await {
        let Some(recorder) = recorder.upgrade() else { return };
        let mut settlements = Vec::new();
        let mut waiting = None;
        recorder.sort(first, &mut settlements, &mut waiting).await;
        let deadline = tokio::time::sleep(SETTLE_EVERY);
        tokio::pin!(deadline);
        // Who flushes does not wait for company.
        while waiting.is_none() && settlements.len() < SETTLE_TOGETHER {
            tokio::select! {
                () = &mut deadline => break,
                parcel = inbox.recv() => match parcel {
                    Some(parcel) => recorder.sort(parcel, &mut settlements, &mut waiting).await,
                    None => break,
                },
            }
        }
        while settlements.len() < SETTLE_TOGETHER
            && let Ok(parcel) = inbox.try_recv()
        {
            recorder.sort(parcel, &mut settlements, &mut waiting).await;
        }
        if !settlements.is_empty()
            && let Err(error) = recorder.store.settle(settlements).await
        {
            tracing::warn!(%error, "deliveries are not written; after a restart these answers count as delivered unless asked for again");
        }
        for done in waiting.into_iter().flatten() {
            let _gone = oneshot::Sender::send(done, ());
        }
    }
}

impl Recorder {
    /// Gives an answer to the connection that waited for it; `None` where nothing depends on whether it takes it.
    pub(crate) fn hand_over(&self, key: &AttemptKey, digest: [u8; 32], call: Recorded) -> Option<Handover> {
        if !call.answered {
            return None;
        }
        // Recorded as delivered, it needs news only if that is wrong; and the other way round.
        let again = call.claimed || !call.delivered;
        let parcel = Settled { key: key.clone(), seqs: call.seqs, digest, delivery: Delivery::Undelivered, again };
        Some(Handover { parcel: Some(parcel), outbox: self.outbox.clone() })
    }

    /// Says that nobody waited for a recorded answer any more.
    pub(crate) fn leave_behind(&self, key: &AttemptKey, digest: [u8; 32], call: Recorded) {
        if call.delivered {
            drop(self.hand_over(key, digest, call));
        }
    }

    /// Returns once every delivery reported so far is written.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.outbox.send(Parcel::Flush(done)).is_ok() {
            let _written = written.await;
        }
    }

    async fn sort(
        &self,
        parcel: Parcel,
        settlements: &mut Vec<Settlement>,
        waiting: &mut Option<Vec<oneshot::Sender<()>>>,
    ) {
        match parcel {
            Parcel::Flush(done) => waiting.get_or_insert_default().push(done),
            Parcel::Settled(settled) => {
                let is_news = settled.again == (settled.delivery == Delivery::Delivered);
                if is_news && !self.set_delivery(&settled).await {
                    return;
                }
                if settled.again && !is_news {
                    // It did not reach its second connection either: the next may have it.
                    self.unclaim(&settled).await;
                    return;
                }
                let Settled { key, seqs, delivery, .. } = settled;
                let AttemptKey { rollout_id, attempt_id } = key;
                settlements.push(Settlement { rollout_id, attempt_id, seqs, delivery });
            }
        }
    }

    /// Notes in the tree whether an answer has reached the harness. False where a retry has it: then the end of the first
    /// connection is no news.
    async fn set_delivery(&self, settled: &Settled) -> bool {
        let Ok(mut guard) = self.open(&settled.key).await else { return true };
        let Ok(attempt) = loaded(&mut guard) else { return true };
        let delivered = settled.delivery == Delivery::Delivered;
        if let Some(call) = attempt.asked_with(&settled.digest, &settled.seqs) {
            if !delivered && call.claimed && call.delivered {
                return false;
            }
            call.delivered = delivered;
        }
        for &seq in &settled.seqs {
            // A tree that was rebuilt meanwhile has the row too.
            let _unknown = attempt.tree.set_delivery(seq, settled.delivery);
        }
        true
    }

    async fn unclaim(&self, settled: &Settled) {
        let Ok(mut guard) = self.open(&settled.key).await else { return };
        let Ok(attempt) = loaded(&mut guard) else { return };
        if let Some(call) = attempt.asked_with(&settled.digest, &settled.seqs) {
            call.claimed = false;
        }
    }
}
