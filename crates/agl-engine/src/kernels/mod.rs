//! The element-wise work of the model as plain loops over `f32` slices, each fused into one pass.
//!
//! The tensor library provides the matrix products; everything between two of them is memory traffic, and composing it
//! from single operations reads and writes each activation five to ten times. These kernels touch it once. They know
//! nothing of tensors: [`crate::ops`] registers them, with their derivatives, as operations of the library.
//!
//! Parallel loops split their rows into blocks of a fixed size, not by the number of threads, so that a result is the
//! same on every machine.

pub(crate) mod cached_attention;
pub(crate) mod gated;
pub(crate) mod log_prob;
pub(crate) mod rms_norm;
pub(crate) mod rope;
mod simd;
pub(crate) mod softmax;

/// How a query looks at the positions before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Attention {
    /// Products of queries and keys are multiplied by this.
    pub scale: f32,
    /// Positions seen at most, the query's own included; all of them if absent.
    pub window: Option<usize>,
}

impl Attention {
    /// The earliest position that a query at `position` sees.
    fn first_seen(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// Rows per parallel block such that a block holds about 16 Ki elements: below that, handing work out costs more than doing it.
fn rows_per_block(row_len: usize) -> usize {
    (16_384 / row_len.max(1)).max(1)
}
