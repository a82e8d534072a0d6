//! The token tree of one attempt: a radix tree over token ids in which every call is a pair of marks, the end of its prompt
//! and the end of its answer. Tokens that several calls share are held once, so memory grows with a rollout's tokens and not
//! with turns × context.
//!
//! The tree is a cache: [`TokenTree::insert`] rebuilds it from stored [`CallRow`]s.

use super::row::{CallOutcome, CallRow, Delivery, VersionRun};

/// A call to be recorded: everything the gateway knows once an answer is there.
#[derive(Clone, Debug)]
pub struct NewCall<'a> {
    /// See [`CallRow::seq`]; must be above every recorded one.
    pub seq: u64,
    /// See [`CallRow::call_id`].
    pub call_id: String,
    /// See [`CallRow::choice`].
    pub choice: u32,
    /// The whole prompt.
    pub prompt: &'a [u32],
    /// See [`CallRow::sampled`].
    pub sampled: Vec<u32>,
    /// See [`CallRow::log_probs`].
    pub log_probs: Option<Vec<f32>>,
    /// See [`CallRow::versions`].
    pub versions: Vec<VersionRun>,
    /// See [`CallRow::delivery`].
    pub delivery: Delivery,
    /// See [`CallRow::outcome`].
    pub outcome: CallOutcome,
    /// See [`CallRow::trainable`].
    pub trainable: bool,
}

/// How a call continues what its attempt said before; see [`TokenTree::continuation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// It begins a conversation: no earlier call's prompt is the beginning of its own.
    New,
    /// It goes on exactly where an earlier call ended: the prefix condition holds.
    Merge,
    /// It continues an earlier call's prompt, but not its answer to the end.
    Break,
    /// It asks just what an earlier call was asked: another draw.
    Branch,
}

/// Why a row cannot be part of a tree. None of these is repaired in silence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// Rows come in the order of their `seq`.
    #[error("call row {seq} comes after row {last}: rows must be in ascending order")]
    OutOfOrder {
        /// The offending row.
        seq: u64,
        /// The last one before it.
        last: u64,
    },
    /// The parent is not among the rows before.
    #[error("call row {seq} names parent {parent}, which is not recorded")]
    UnknownParent {
        /// The offending row.
        seq: u64,
        /// The missing parent.
        parent: u64,
    },
    /// The prefix is longer than the parent's path.
    #[error("call row {seq} shares {shared} tokens with parent {parent}, whose path has {available}")]
    PrefixTooLong {
        /// The offending row.
        seq: u64,
        /// Its parent.
        parent: u64,
        /// What it claims.
        shared: u32,
        /// What there is.
        available: u32,
    },
    /// Two vectors that must be parallel are not.
    #[error("call row {seq}: {sampled} sampled tokens but {other} {what}")]
    LengthMismatch {
        /// The offending row.
        seq: u64,
        /// Number of sampled tokens.
        sampled: usize,
        /// Number of the others.
        other: usize,
        /// `log-probs` or `policy versions`.
        what: &'static str,
    },
    /// There is no such row.
    #[error("call row {seq} is not recorded")]
    UnknownCall {
        /// The row asked for.
        seq: u64,
    },
}

pub(super) type NodeId = usize;
const ROOT: NodeId = 0;

/// A run of tokens. Marks point to the *end* of a node; a split gives the new node the upper half, so marks stay true.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) parent: NodeId,
    tokens: Vec<u32>,
    /// Number of tokens from the root to the end of this node.
    pub(super) depth: u32,
    children: Vec<NodeId>,
    /// Index of the newest call whose path passes through the end of this node.
    newest: Option<usize>,
    /// Indexes of the calls whose path ends here, oldest first.
    pub(super) ends: Vec<usize>,
}

/// A recorded call: a [`CallRow`] whose tokens live in the tree.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) seq: u64,
    pub(super) call_id: String,
    pub(super) parent: Option<u64>,
    pub(super) shared_prefix: u32,
    /// End of the prompt.
    pub(super) prompt_end: NodeId,
    /// End of the answer; `(p, a)` is the path from the root to here.
    pub(super) path_end: NodeId,
    pub(super) log_probs: Option<Vec<f32>>,
    pub(super) versions: Vec<VersionRun>,
    pub(super) delivery: Delivery,
    pub(super) outcome: CallOutcome,
    pub(super) trainable: bool,
}

impl Recorded {
    pub(super) fn is_live(&self) -> bool {
        self.outcome == CallOutcome::Ok && self.delivery == Delivery::Delivered
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct TokenTree {
    pub(super) nodes: Vec<Node>,
    pub(super) calls: Vec<Recorded>,
}

impl Default for TokenTree {
    fn default() -> Self {
        Self::new()
    }
}

impl TokenTree {
    /// A tree without calls.
    #[must_use]
    pub fn new() -> Self {
        let root =
            Node { parent: ROOT, tokens: Vec::new(), depth: 0, children: Vec::new(), newest: None, ends: Vec::new() };
        Self { nodes: vec![root], calls: Vec::new() }
    }

    /// Number of recorded rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// True before the first row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Number of tokens held, each shared one counted once.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.nodes.iter().map(|node| node.tokens.len()).sum()
    }

    /// Matches a call against every path of the attempt, records it, and gives back the row to store.
    ///
    /// The parent is the path with the longest shared prefix, then the newest; a path that ends exactly where the match ends
    /// goes before one that only passes through.
    ///
    /// # Errors
    /// Where log-probs or versions are not parallel to the sampled tokens, or `seq` is not above the last; nothing is recorded.
    pub fn record(&mut self, call: NewCall<'_>) -> Result<CallRow, TreeError> {
        let (parent, shared) =
            if call.outcome == CallOutcome::Ok { self.longest_match(call.prompt) } else { (None, 0) };
        let row = CallRow {
            seq: call.seq,
            call_id: call.call_id,
            choice: call.choice,
            parent,
            shared_prefix: u32_len(shared),
            inserted: call.prompt[shared..].to_vec(),
            sampled: call.sampled,
            log_probs: call.log_probs,
            versions: call.versions,
            delivery: call.delivery,
            outcome: call.outcome,
            trainable: call.trainable,
        };
        self.insert(row.clone())?;
        Ok(row)
    }

    /// Adds a stored row: how a tree is rebuilt. Rows come in ascending `seq`.
    ///
    /// # Errors
    /// Where the row contradicts itself or the rows before it; nothing is added.
    pub fn insert(&mut self, row: CallRow) -> Result<(), TreeError> {
        self.check(&row)?;
        let start = match row.parent.and_then(|seq| self.position(seq)) {
            Some(parent) => self.boundary_at(self.calls[parent].path_end, row.shared_prefix),
            None => ROOT,
        };
        let (prompt_end, path_end) = if row.outcome == CallOutcome::Ok {
            let prompt_end = self.extend(start, &row.inserted);
            (prompt_end, self.extend(prompt_end, &row.sampled))
        } else {
            (ROOT, ROOT)
        };
        let index = self.calls.len();
        if row.outcome == CallOutcome::Ok {
            self.nodes[path_end].ends.push(index);
            let mut node = path_end;
            while node != ROOT {
                self.nodes[node].newest = Some(index);
                node = self.nodes[node].parent;
            }
        }
        self.calls.push(Recorded {
            seq: row.seq,
            call_id: row.call_id,
            parent: row.parent,
            shared_prefix: row.shared_prefix,
            prompt_end,
            path_end,
            log_probs: row.log_probs,
            versions: row.versions,
            delivery: row.delivery,
            outcome: row.outcome,
            trainable: row.trainable,
        });
        Ok(())
    }

    /// Says what became of an answer after it was recorded. One that is superseded stays so.
    ///
    /// # Errors
    /// [`TreeError::UnknownCall`].
    pub fn set_delivery(&mut self, seq: u64, delivery: Delivery) -> Result<(), TreeError> {
        let index = self.position(seq).ok_or(TreeError::UnknownCall { seq })?;
        // As in the stores: what a retry has replaced stays so.
        if self.calls[index].delivery != Delivery::Superseded {
            self.calls[index].delivery = delivery;
        }
        Ok(())
    }

    /// How a recorded call continues what the attempt said before it.
    ///
    /// # Errors
    /// [`TreeError::UnknownCall`].
    pub fn continuation(&self, seq: u64) -> Result<Continuation, TreeError> {
        let known = |seq| self.position(seq).ok_or(TreeError::UnknownCall { seq });
        let call = &self.calls[known(seq)?];
        let Some(mut before) = call.parent else { return Ok(Continuation::New) };
        if call.shared_prefix == self.depth(self.calls[known(before)?].path_end) {
            return Ok(Continuation::Merge);
        }
        if call.shared_prefix == self.depth(call.prompt_end) {
            return Ok(Continuation::Branch);
        }
        // They part somewhere on the way: behind the prompt of an earlier call, or in what all conversations begin with.
        loop {
            let earlier = &self.calls[known(before)?];
            if call.shared_prefix >= self.depth(earlier.prompt_end) {
                return Ok(Continuation::Break);
            }
            let Some(parent) = earlier.parent else { return Ok(Continuation::New) };
            before = parent;
        }
    }

    /// The prompt of a recorded call.
    ///
    /// # Errors
    /// [`TreeError::UnknownCall`].
    pub fn prompt(&self, seq: u64) -> Result<Vec<u32>, TreeError> {
        let index = self.position(seq).ok_or(TreeError::UnknownCall { seq })?;
        Ok(self.tokens_to(self.calls[index].prompt_end))
    }

    /// The prompt and the answer of a recorded call.
    ///
    /// # Errors
    /// [`TreeError::UnknownCall`].
    pub fn path(&self, seq: u64) -> Result<Vec<u32>, TreeError> {
        let index = self.position(seq).ok_or(TreeError::UnknownCall { seq })?;
        Ok(self.tokens_to(self.calls[index].path_end))
    }

    pub(super) fn position(&self, seq: u64) -> Option<usize> {
        self.calls.binary_search_by_key(&seq, |call| call.seq).ok()
    }

    pub(super) fn tokens_to(&self, mut node: NodeId) -> Vec<u32> {
        let mut runs = Vec::new();
        while node != ROOT {
            runs.push(node);
            node = self.nodes[node].parent;
        }
        runs.iter().rev().flat_map(|&run| self.nodes[run].tokens.iter().copied()).collect()
    }

    fn check(&self, row: &CallRow) -> Result<(), TreeError> {
        let seq = row.seq;
        if let Some(last) = self.calls.last().map(|call| call.seq).filter(|&last| last >= seq) {
            return Err(TreeError::OutOfOrder { seq, last });
        }
        let sampled = row.sampled.len();
        if let Some(other) = row.log_probs.as_ref().map(Vec::len).filter(|&other| other != sampled) {
            return Err(TreeError::LengthMismatch { seq, sampled, other, what: "log-probs" });
        }
        let versions: usize = row.versions.iter().map(|run| run.count as usize).sum();
        if versions != sampled {
            return Err(TreeError::LengthMismatch { seq, sampled, other: versions, what: "policy versions" });
        }
        if let Some(parent) = row.parent {
            let index = self.position(parent).ok_or(TreeError::UnknownParent { seq, parent })?;
            let available = self.nodes[self.calls[index].path_end].depth;
            if row.shared_prefix > available {
                return Err(TreeError::PrefixTooLong { seq, parent, shared: row.shared_prefix, available });
            }
        }
        Ok(())
    }

    /// The parent's `seq` and the number of shared tokens.
    fn longest_match(&self, prompt: &[u32]) -> (Option<u64>, usize) {
        let mut node = ROOT;
        let mut matched = 0;
        loop {
            let rest = &prompt[matched..];
            let Some(child) = rest.first().and_then(|&first| self.child(node, first)) else { break };
            let common = common_prefix(&self.nodes[child].tokens, rest);
            matched += common;
            node = child;
            if common < self.nodes[child].tokens.len() {
                break;
            }
        }
        let reached_end = matched == self.nodes[node].depth as usize;
        let exact = self.nodes[node].ends.last().copied().filter(|_| reached_end);
        let parent = exact.or(self.nodes[node].newest).map(|index| self.calls[index].seq);
        (parent.filter(|_| matched > 0), matched)
    }

    fn child(&self, node: NodeId, first: u32) -> Option<NodeId> {
        self.nodes[node].children.iter().copied().find(|&child| self.nodes[child].tokens[0] == first)
    }

    /// The node that ends `depth` tokens below the root on the way to `node`, split off if need be.
    fn boundary_at(&mut self, mut node: NodeId, depth: u32) -> NodeId {
        loop {
            let above = self.nodes[node].depth - u32_len(self.nodes[node].tokens.len());
            if depth > above || node == ROOT {
                break;
            }
            node = self.nodes[node].parent;
        }
        let below = (self.nodes[node].depth - depth) as usize;
        if below == 0 { node } else { self.split(node, self.nodes[node].tokens.len() - below) }
    }

    /// Walks down from the end of `node`, adding what is not there yet; the end of `tokens` becomes the end of a node.
    fn extend(&mut self, mut node: NodeId, tokens: &[u32]) -> NodeId {
        let mut done = 0;
        while done < tokens.len() {
            let rest = &tokens[done..];
            let Some(child) = self.child(node, rest[0]) else {
                return self.add_child(node, rest);
            };
            let common = common_prefix(&self.nodes[child].tokens, rest);
            node = if common < self.nodes[child].tokens.len() { self.split(child, common) } else { child };
            done += common;
        }
        node
    }

    fn add_child(&mut self, parent: NodeId, tokens: &[u32]) -> NodeId {
        let depth = self.nodes[parent].depth + u32_len(tokens.len());
        let id = self.nodes.len();
        self.nodes.push(Node {
            parent,
            tokens: tokens.to_vec(),
            depth,
            children: Vec::new(),
            newest: None,
            ends: Vec::new(),
        });
        self.nodes[parent].children.push(id);
        id
    }

    /// Puts a new node that holds the first `at` tokens above `node`, which keeps the rest, and gives back the new one.
    fn split(&mut self, node: NodeId, at: usize) -> NodeId {
        let upper = self.nodes.len();
        let parent = self.nodes[node].parent;
        let lower_tokens = self.nodes[node].tokens.split_off(at);
        let upper_tokens = std::mem::replace(&mut self.nodes[node].tokens, lower_tokens);
        let depth = self.nodes[parent].depth + u32_len(upper_tokens.len());
        let newest = self.nodes[node].newest;
        self.nodes.push(Node { parent, tokens: upper_tokens, depth, children: vec![node], newest, ends: Vec::new() });
        self.nodes[node].parent = upper;
        if let Some(slot) = self.nodes[parent].children.iter_mut().find(|child| **child == node) {
            *slot = upper;
        }
        upper
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    const STRIDE: usize = 64;
    let length = a.len().min(b.len());
    let mut done = 0;
    // Whole strides compare as memory; only the last one is looked at token by token.
    while done + STRIDE <= length && a[done..done + STRIDE] == b[done..done + STRIDE] {
        done += STRIDE;
    }
    done + a[done..length].iter().zip(&b[done..length]).take_while(|(x, y)| x == y).count()
}

/// Paths are bounded by the gateway's body limit (64 MiB), far below `u32::MAX` tokens.
fn u32_len(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
