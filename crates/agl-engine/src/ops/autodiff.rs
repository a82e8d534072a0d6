//! How the training operations enter the recorded graph: what each keeps for its backward pass.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;

use super::training::{TrainingDerivatives, TrainingOps};
use crate::kernels::Attention;
use crate::kernels::gated::Activation;

#[derive(Debug)]
struct RmsNorm;

impl<B: TrainingDerivatives> Backward<B, 2> for RmsNorm {
    type State = (FloatTensor<B>, FloatTensor<B>, f32);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [x_node, weight_node] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let (x, weight, eps) = ops.state;
        let (grad_x, grad_weight) = B::rms_norm_backward(x, weight, grad, eps);
        if let Some(node) = x_node {
            grads.register::<B>(node.id, grad_x);
        }
        if let Some(node) = weight_node {
            grads.register::<B>(node.id, grad_weight);
        }
    }
}

#[derive(Debug)]
struct Rotate;

impl<B: TrainingDerivatives> Backward<B, 1> for Rotate {
    type State = (FloatTensor<B>, FloatTensor<B>, f32);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [x_node] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let (cos, sin, direction) = ops.state;
        if let Some(node) = x_node {
            // A rotation is orthogonal: its transpose turns back.
            grads.register::<B>(node.id, B::rotate(grad, cos, sin, -direction));
        }
    }
}

#[derive(Debug)]
struct Gated;

impl<B: TrainingDerivatives> Backward<B, 2> for Gated {
    type State = (FloatTensor<B>, FloatTensor<B>, Activation);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [gate_node, up_node] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let (gate, up, activation) = ops.state;
        let (grad_gate, grad_up) = B::gated_backward(gate, up, grad, activation);
        if let Some(node) = gate_node {
            grads.register::<B>(node.id, grad_gate);
        }
        if let Some(node) = up_node {
            grads.register::<B>(node.id, grad_up);
        }
    }
}

#[derive(Debug)]
struct CausalSoftmax;

impl<B: TrainingDerivatives> Backward<B, 1> for CausalSoftmax {
    type State = (FloatTensor<B>, Attention);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [scores_node] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let (probs, attention) = ops.state;
        if let Some(node) = scores_node {
            grads.register::<B>(node.id, B::causal_softmax_backward(probs, grad, attention));
        }
    }
}

impl<B: TrainingDerivatives, C: CheckpointStrategy> TrainingOps for Autodiff<B, C> {
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f32) -> FloatTensor<Self> {
        let ((x, x_node), (weight, weight_node)) = (x.into_parts(), weight.into_parts());
        match RmsNorm.prepare::<C>([x_node, weight_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::rms_norm(x.clone(), weight.clone(), eps);
                prep.finish((x, weight, eps), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rms_norm(x, weight, eps)),
        }
    }

    fn rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        direction: f32,
    ) -> FloatTensor<Self> {
        let (x, x_node) = x.into_parts();
        let ((cos, _), (sin, _)) = (cos.into_parts(), sin.into_parts());
        match Rotate.prepare::<C>([x_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::rotate(x, cos.clone(), sin.clone(), direction);
                prep.finish((cos, sin, direction), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rotate(x, cos, sin, direction)),
        }
    }

    fn gated(gate: FloatTensor<Self>, up: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
        let ((gate, gate_node), (up, up_node)) = (gate.into_parts(), up.into_parts());
        match Gated.prepare::<C>([gate_node, up_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::gated(gate.clone(), up.clone(), activation);
                prep.finish((gate, up, activation), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::gated(gate, up, activation)),
        }
    }

    fn causal_softmax(scores: FloatTensor<Self>, attention: Attention) -> FloatTensor<Self> {
        let (scores, scores_node) = scores.into_parts();
        match CausalSoftmax.prepare::<C>([scores_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let probs = B::causal_softmax(scores, attention);
                prep.finish((probs.clone(), attention), probs)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::causal_softmax(scores, attention)),
        }
    }
}
