//! Why a call did not extend the path before it. The gateway has no tokenizer, so whoever has one passes a decoder in.

use serde::{Deserialize, Serialize};

use super::sequence::PathBreak;

/// Token ids to text; special tokens are kept.
pub trait TokenDecoder {
    /// The text of the tokens. Bytes that are no valid UTF-8 become replacement characters.
    fn decode(&self, tokens: &[u32]) -> String;
}

/// The cause of a break, as far as the two texts tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BreakClass {
    /// The two part inside the first prompt: a sub-agent or another task, no break of this path.
    NewConversation,
    /// The same text in other tokens: `Tok(Decode(a)) ≠ a`.
    Retokenisation,
    /// The same turn, rendered another way: thinking stripped, white space, re-serialised tool calls.
    ChatTemplate,
    /// The harness shows another history than the one that was sampled under.
    RewrittenHistory,
}

impl PathBreak {
    /// Names the cause by decoding both sides.
    #[must_use]
    pub fn classify(&self, decoder: &dyn TokenDecoder) -> BreakClass {
        if self.new_conversation {
            return BreakClass::NewConversation;
        }
        let (old, new) = (decoder.decode(&self.previous_tokens), decoder.decode(&self.tokens));
        if agree(&old, &new) {
            return BreakClass::Retokenisation;
        }
        let (bare_old, bare_new) = (without_rendering(&old), without_rendering(&new));
        if agree(&bare_old, &bare_new) { BreakClass::ChatTemplate } else { BreakClass::RewrittenHistory }
    }
}

/// True if one text starts with the other: the windows are cut at different lengths.
fn agree(old: &str, new: &str) -> bool {
    // The last characters of a window may be half of a character or of a word; the shorter side decides.
    let old = old.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let new = new.trim_end_matches(char::REPLACEMENT_CHARACTER);
    new.starts_with(old) || old.starts_with(new)
}

/// Drops what templates add or strip by themselves: thinking blocks and white space.
fn without_rendering(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    // A window that starts inside a thinking block shows only its end.
    if let Some(close) = rest.find("</think>")
        && rest.find("<think>").is_none_or(|open| open > close)
    {
        rest = &rest[close + "</think>".len()..];
    }
    while let Some(open) = rest.find("<think>") {
        kept.push_str(&rest[..open]);
        rest = match rest[open..].find("</think>") {
            Some(close) => &rest[open + close + "</think>".len()..],
            None => "",
        };
    }
    kept.push_str(rest);
    kept.retain(|c| !c.is_whitespace());
    kept
}
