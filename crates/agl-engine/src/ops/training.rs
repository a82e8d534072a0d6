//! Differentiable operations of the decoder.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use crate::kernels::Attention;
use crate::kernels::gated::Activation;

/// Forward passes, dispatched on the backend and on whether a graph is recorded.
#[backend_extension(Flex, Autodiff)]
pub(crate) trait TrainingOps: Backend {
    /// See [`rms_norm`].
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f32) -> FloatTensor<Self>;
    /// See [`rotate`].
    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        direction: f32,
    ) -> FloatTensor<Self>;
    /// See [`gated`].
    fn gated(gate: FloatTensor<Self>, up: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;
    /// See [`causal_softmax`].
    fn causal_softmax(scores: FloatTensor<Self>, attention: Attention) -> FloatTensor<Self>;
}

/// The derivatives of [`TrainingOps`], which a backend provides to be trained on.
pub(crate) trait TrainingDerivatives: TrainingOps {
    /// (∂L/∂x, ∂L/∂weight).
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        eps: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
    /// (∂L/∂gate, ∂L/∂up).
    fn gated_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        activation: Activation,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
    /// ∂L/∂scores from the probabilities.
    fn causal_softmax_backward(
        probs: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        attention: Attention,
    ) -> FloatTensor<Self>;
}

/// w · x / √(mean(x²) + ε) over the last dimension of `x` [rows, n]; `weight` is [1, n].
pub(crate) fn rms_norm(x: Tensor<2>, weight: Tensor<2>, eps: f32) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::rms_norm(x.into_dispatch(), weight.into_dispatch(), eps))
}

/// Rotary embedding of `x` [rows, heads · d] by the angles `cos`, `sin` [rows, d/2].
pub(crate) fn rotate(x: Tensor<2>, cos: Tensor<2>, sin: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::rotate(x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch(), 1.0))
}

/// act(gate) · up, element by element.
pub(crate) fn gated(gate: Tensor<2>, up: Tensor<2>, activation: Activation) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::gated(gate.into_dispatch(), up.into_dispatch(), activation))
}

/// softmax(scores · scale) over the last dimension of [blocks, stacked queries, len], query r seeing keys 0 ..= r mod len or
/// as many of the last of them as the window holds.
pub(crate) fn causal_softmax(scores: Tensor<4>, attention: Attention) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::causal_softmax(scores.into_dispatch(), attention))
}
