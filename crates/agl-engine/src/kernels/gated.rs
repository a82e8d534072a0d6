//! The gated activation of the feed-forward block: y = act(gate) · up.
//!
//! Both activations have the form act(x) = x·σ(z(x)): SiLU with z = x, and the tanh approximation of GELU with
//! z = √(8/π)·(x + 0.044715·x³), since ½(1 + tanh u) = σ(2u). Hence act′(x) = σ·(1 + x·z′(x)·(1 − σ)).

use rayon::prelude::*;

use super::simd;

const BLOCK: usize = 16_384;

/// √(8/π).
const GELU_SLOPE: f32 = 1.595_769;
const GELU_CUBIC: f32 = 0.044_715;

/// What is applied to the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// x·σ(x).
    Silu,
    /// x·Φ(x), the normal distribution function approximated by a tanh.
    GeluTanh,
}

/// Writes y into `out`.
pub(crate) fn forward(gate: &[f32], up: &[f32], activation: Activation, out: &mut [f32]) {
    match activation {
        Activation::Silu => forward_with(
            gate,
            up,
            #[inline(always)]
            |x| x,
            out,
        ),
        Activation::GeluTanh => forward_with(gate, up, gelu_argument, out),
    }
}

/// Writes ∂L/∂gate and ∂L/∂up, given ∂L/∂y.
pub(crate) fn backward(
    gate: &[f32],
    up: &[f32],
    grad: &[f32],
    activation: Activation,
    grad_gate: &mut [f32],
    grad_up: &mut [f32],
) {
    match activation {
        Activation::Silu => backward_with(
            gate,
            up,
            grad,
            #[inline(always)]
            |x| (x, 1.0),
            grad_gate,
            grad_up,
        ),
        Activation::GeluTanh => backward_with(
            gate,
            up,
            grad,
            #[inline(always)]
            |x| (gelu_argument(x), gelu_argument_slope(x)),
            grad_gate,
            grad_up,
        ),
    }
}

#[inline(always)]
fn gelu_argument(x: f32) -> f32 {
    GELU_SLOPE * x * (1.0 + GELU_CUBIC * x * x)
}

#[inline(always)]
fn gelu_argument_slope(x: f32) -> f32 {
    GELU_SLOPE * (1.0 + 3.0 * GELU_CUBIC * x * x)
}

/// `argument` is z.
fn forward_with(gate: &[f32], up: &[f32], argument: impl Fn(f32) -> f32 + Sync, out: &mut [f32]) {
    out.par_chunks_mut(BLOCK).zip(gate.par_chunks(BLOCK).zip(up.par_chunks(BLOCK))).for_each(|(out, (gate, up))| {
        simd::vectorised(
            #[inline(always)]
            || {
                for ((out, g), u) in out.iter_mut().zip(gate).zip(up) {
                    *out = g * simd::sigmoid(argument(*g)) * u;
                }
            },
        );
    });
}

/// `argument` is (z, z′).
fn backward_with(
    gate: &[f32],
    up: &[f32],
    grad: &[f32],
    argument: impl Fn(f32) -> (f32, f32) + Sync,
    grad_gate: &mut [f32],
    grad_up: &mut [f32],
) {
    grad_gate
        .par_chunks_mut(BLOCK)
        .zip(grad_up.par_chunks_mut(BLOCK))
        .zip(gate.par_chunks(BLOCK).zip(up.par_chunks(BLOCK)).zip(grad.par_chunks(BLOCK)))
        .for_each(|((grad_gate, grad_up), ((gate, up), grad))| {
            simd::vectorised(
                #[inline(always)]
                || {
                    let inputs = gate.iter().zip(up).zip(grad);
                    for ((dg, du), ((g, u), d)) in grad_gate.iter_mut().zip(grad_up.iter_mut()).zip(inputs) {
                        let (z, slope) = argument(*g);
                        let s = simd::sigmoid(z);
                        *du = d * g * s;
                        *dg = d * u * s * (1.0 + g * slope * (1.0 - s));
                    }
                },
            );
        });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `torch.nn.functional.gelu(x, approximate="tanh")`.
    #[test]
    fn gelu_equals_that_of_pytorch() {
        let x = [-5.0, -1.0, -0.1, 0.0, 0.5, 2.0, 20.0];
        let expected = [-2.291_8e-7, -0.158_808, -0.046_017_25, 0.0, 0.345_714, 1.954_597_7, 20.0];
        let mut out = [0.0; 7];
        forward(&x, &[1.0; 7], Activation::GeluTanh, &mut out);
        for ((x, found), expected) in x.iter().zip(out).zip(expected) {
            assert!((found - expected).abs() < 1e-6, "gelu({x}) is {found} instead of {expected}");
        }
    }

    #[test]
    fn slopes_are_those_of_differences() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let at = |x: f32| {
                let mut out = [0.0];
                forward(&[x], &[1.0], activation, &mut out);
                f64::from(out[0])
            };
            for x in [-3.0f32, -0.7, 0.0, 0.4, 2.5] {
                let (mut grad_gate, mut grad_up) = ([0.0], [0.0]);
                backward(&[x], &[1.0], &[1.0], activation, &mut grad_gate, &mut grad_up);
                let slope = (at(x + 1e-2) - at(x - 1e-2)) / 2e-2;
                let found = f64::from(grad_gate[0]);
                assert!((slope - found).abs() < 1e-4, "{activation:?} at {x}: {found}, but the slope is {slope}");
            }
        }
    }
}
