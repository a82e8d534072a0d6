//! The stream of changes: reconnects and resumes from its cursor by itself.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use agl_core::rollout::RolloutState;
use futures_util::stream::{BoxStream, StreamExt};
use reqwest::{Method, Response};

use crate::error::ClientError;
use crate::transport::{Call, GatewayClient, Repeat, jittered, refusal, unreachable_at};
use crate::wire::{Change, ChangeKind};

/// How many rollouts are listed at once when a snapshot that broke off is completed.
const PAGE: usize = 500;

/// What the stream knows between two changes.
struct Watch {
    client: GatewayClient,
    /// Resume after this change.
    after: Option<u64>,
    /// The snapshot with which a watch without cursor begins may not have been read to its end.
    in_snapshot: bool,
    connection: Option<Response>,
    parser: SseParser,
    ready: VecDeque<Change>,
    away_since: Option<Instant>,
    backoff: Duration,
    ended: bool,
}

const FIRST_BACKOFF: Duration = Duration::from_millis(20);
const LONGEST_BACKOFF: Duration = Duration::from_secs(1);

impl GatewayClient {
    /// Changes of rollouts from the cursor `after` on; without one, first every rollout that has not ended
    /// ([`ChangeKind::Snapshot`]) and then what changes.
    ///
    /// A change may come twice around a reconnection, and the rollout it carries may then be newer than the change:
    /// compare `status.version`. The stream gives [`ClientError::Unreachable`] each time the gateway has been away for
    /// the client's patience, and goes on when asked again; after any other error it ends.
    pub fn watch(&self, after: Option<u64>) -> BoxStream<'static, Result<Change, ClientError>> {
        let watch = Watch {
            client: self.clone(),
            after,
            in_snapshot: false,
            connection: None,
            parser: SseParser::default(),
            ready: VecDeque::new(),
            away_since: None,
            backoff: FIRST_BACKOFF,
            ended: false,
        };
        futures_util::stream::unfold(watch, |mut watch| async move {
            let item = watch.next().await?;
            Some((item, watch))
        })
        .boxed()
    }
}

impl Watch {
    async fn next(&mut self) -> Option<Result<Change, ClientError>> {
        if self.ended {
            return None;
        }
        loop {
            if let Some(change) = self.ready.pop_front() {
                return Some(Ok(change));
            }
            if let Err(error) = self.read_more().await {
                self.ended = !matches!(error, ClientError::Unreachable { .. });
                return Some(Err(error));
            }
        }
    }

    /// Connects if need be and reads until something was learned or lost.
    async fn read_more(&mut self) -> Result<(), ClientError> {
        let Some(connection) = &mut self.connection else {
            return self.connect().await;
        };
        match connection.chunk().await {
            Ok(Some(bytes)) => {
                self.backoff = FIRST_BACKOFF;
                for block in self.parser.push(&bytes) {
                    self.take(&block)?;
                }
            }
            Ok(None) | Err(_) => {
                self.connection = None;
                self.parser = SseParser::default();
                self.pause().await;
            }
        }
        Ok(())
    }

    /// Takes one event of the stream.
    fn take(&mut self, block: &Block) -> Result<(), ClientError> {
        let Some(data) = &block.data else {
            // A keep-alive comes only after a while without events: the snapshot is through.
            self.in_snapshot = false;
            return Ok(());
        };
        let change: Change = serde_json::from_str(data).map_err(|source| {
            let url = self.client.url(&["api", "rollouts", "watch"]).to_string();
            ClientError::Decode { url, source }
        })?;
        self.in_snapshot = change.kind == ChangeKind::Snapshot;
        self.after = Some(change.cursor);
        self.ready.push_back(change);
        Ok(())
    }

    async fn connect(&mut self) -> Result<(), ClientError> {
        if let (true, Some(cursor)) = (self.in_snapshot, self.after) {
            // The rest of the broken snapshot is listed; what has changed since its cursor is then replayed.
            self.list_unfinished(cursor).await?;
            self.in_snapshot = false;
        }
        let mut url = self.client.url(&["api", "rollouts", "watch"]);
        if let Some(after) = self.after {
            url.query_pairs_mut().append_pair("after", &after.to_string());
        }
        let call = Call { method: Method::GET, url, body: None, repeat: Repeat::Freely };
        match self.client.send_once(&call).await {
            Ok(response) if response.status().is_success() => {
                self.client.note_back();
                self.away_since = None;
                // That it accepts is no reason to hurry: it may end every stream at once.
                self.connection = Some(response);
                Ok(())
            }
            Ok(response) if crate::transport::is_away(response.status()) => {
                let error = refusal(&call, response).await;
                self.wait(error).await
            }
            Ok(response) => Err(refusal(&call, response).await),
            Err(error) => {
                let since = self.away_since.unwrap_or_else(Instant::now);
                let error = unreachable_at(&call.url, since, error);
                self.wait(error).await
            }
        }
    }

    /// Waits before the next try, or gives up for now where patience has ended.
    async fn wait(&mut self, error: ClientError) -> Result<(), ClientError> {
        self.client.note_away(&error);
        let since = *self.away_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= self.client.patience() {
            self.away_since = None;
            let url = self.client.url(&["api", "rollouts", "watch"]).to_string();
            return Err(match error {
                unreachable @ ClientError::Unreachable { .. } => unreachable,
                other => ClientError::Unreachable { url, waited: since.elapsed(), source: Box::new(other) },
            });
        }
        self.pause().await;
        Ok(())
    }

    /// Waits before connecting again, longer each time until something is received.
    async fn pause(&mut self) {
        tokio::time::sleep(jittered(self.backoff)).await;
        self.backoff = (self.backoff * 2).min(LONGEST_BACKOFF);
    }

    async fn list_unfinished(&mut self, cursor: u64) -> Result<(), ClientError> {
        let states = [RolloutState::Queuing, RolloutState::Running];
        let mut after: Option<String> = None;
        loop {
            let page = match self.client.list_rollouts(&states, PAGE, after.as_deref(), None).await {
                // The last of the page before has been deleted meanwhile: from the start again.
                Err(error) if error.is_not_found() && after.is_some() => {
                    after = None;
                    continue;
                }
                page => page?,
            };
            let complete = page.len() < PAGE;
            after = page.last().map(|rollout| rollout.rollout_id.clone());
            self.ready.extend(page.into_iter().map(|rollout| Change {
                cursor,
                kind: ChangeKind::Snapshot,
                rollout_id: rollout.rollout_id.clone(),
                rollout: Some(rollout),
            }));
            if complete {
                return Ok(());
            }
        }
    }
}

/// One block of a server-sent event stream: an event with data, or a comment.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    data: Option<String>,
}

/// Splits a byte stream into blocks; keeps what is not complete yet.
#[derive(Default)]
struct SseParser {
    buffer: Vec<u8>,
    /// No blank line begins before this offset of `buffer`.
    searched: usize,
}

impl SseParser {
    fn push(&mut self, bytes: &[u8]) -> Vec<Block> {
        self.buffer.extend_from_slice(bytes);
        let mut blocks = Vec::new();
        while let Some((end, next)) = self.blank_line() {
            blocks.push(block_of(&self.buffer[..end]));
            self.buffer.drain(..next);
            self.searched = 0;
        }
        self.searched = self.buffer.len().saturating_sub(3);
        blocks
    }

    /// Where the first complete block ends, and where the next one begins.
    fn blank_line(&self) -> Option<(usize, usize)> {
        let rest = &self.buffer[self.searched..];
        let at = |needle: &[u8]| {
            let found = rest.windows(needle.len()).position(|window| window == needle)?;
            Some((self.searched + found, self.searched + found + needle.len()))
        };
        [at(b"\n\n"), at(b"\r\n\r\n")].into_iter().flatten().min()
    }
}

fn block_of(bytes: &[u8]) -> Block {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .map(|value| value.strip_prefix(' ').unwrap_or(value))
        .collect();
    Block { data: (!lines.is_empty()).then(|| lines.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_cut_at_any_byte_gives_the_same_blocks() {
        let stream = b": hello\n\nid: 4\nevent: rollout\ndata: {\"a\":\ndata: 1}\n\nid: 5\r\ndata:x\r\n\r\n: beat\n\n";
        let whole = SseParser::default().push(stream);
        assert_eq!(
            whole.iter().map(|block| block.data.as_deref()).collect::<Vec<_>>(),
            [None, Some("{\"a\":\n1}"), Some("x"), None]
        );
        for cut in 0..stream.len() {
            let mut parser = SseParser::default();
            let mut blocks = parser.push(&stream[..cut]);
            blocks.extend(parser.push(&stream[cut..]));
            assert_eq!(blocks, whole, "cut at byte {cut}");
        }
        let mut parser = SseParser::default();
        let single: Vec<Block> = stream.chunks(1).flat_map(|byte| parser.push(byte)).collect();
        assert_eq!(single, whole);
    }
}
