//! AdamW with PyTorch's arithmetic, and clipping of the gradient's global norm.

use burn::tensor::Tensor;

use crate::config::OptimConfig;
use crate::model::weights::Weights;
use crate::ops::inference::host_values;

/// Running moments of every parameter's gradient, in the order of the layout.
#[derive(Clone, Debug)]
pub(crate) struct OptimizerState {
    /// Updates made.
    pub step: u64,
    pub mean: Vec<Tensor<2>>,
    pub square: Vec<Tensor<2>>,
}

impl OptimizerState {
    pub(crate) fn new(weights: &Weights) -> Self {
        let zeros: Vec<_> = weights.tensors.iter().map(Tensor::zeros_like).collect();
        Self { step: 0, mean: zeros.clone(), square: zeros }
    }
}

/// √Σ g² over all parameters, summed in f64.
pub(crate) fn global_norm(gradients: &[Tensor<2>]) -> f64 {
    let squares = gradients
        .iter()
        .map(|g| host_values(g.clone().mul(g.clone()).sum()).iter().map(|v| f64::from(*v)).sum::<f64>());
    squares.sum::<f64>().sqrt()
}

/// The parameters after one update and the state that goes with them; the arguments stay as they are.
///
/// m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², θ ← θ(1 − η·λ) − η · m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε).
pub(crate) fn step(
    weights: &Weights,
    state: &OptimizerState,
    gradients: Vec<Tensor<2>>,
    norm: f64,
    config: &OptimConfig,
) -> (Weights, OptimizerState) {
    let step = state.step + 1;
    let lr = config.lr;
    let [beta1, beta2] = config.betas;
    let power = i32::try_from(step).unwrap_or(i32::MAX);
    let (correction1, correction2) = (1.0 - beta1.powi(power), 1.0 - beta2.powi(power));
    // As torch.nn.utils.clip_grad_norm_.
    let scale = if config.grad_clip > 0.0 { (config.grad_clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
    let mut next = OptimizerState { step, mean: Vec::new(), square: Vec::new() };
    let mut tensors = Vec::new();
    for (i, gradient) in gradients.into_iter().enumerate() {
        let g = gradient.mul_scalar(scale);
        let m = state.mean[i].clone().mul_scalar(beta1) + g.clone().mul_scalar(1.0 - beta1);
        let v = state.square[i].clone().mul_scalar(beta2) + g.clone().mul(g).mul_scalar(1.0 - beta2);
        let denominator = v.clone().div_scalar(correction2).sqrt().add_scalar(config.eps);
        let decayed = weights.tensors[i].clone().mul_scalar(1.0 - lr * config.weight_decay);
        tensors.push(decayed - m.clone().mul_scalar(lr / correction1) / denominator);
        next.mean.push(m);
        next.square.push(v);
    }
    (Weights { layout: weights.layout.clone(), tensors }, next)
}
