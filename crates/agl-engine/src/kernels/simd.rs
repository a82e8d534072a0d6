//! Vector arithmetic that the compiler can vectorise for the instruction set found at run time.

/// Runs `f` compiled for the widest vector instructions of this processor.
///
/// `f` and what it calls must be `#[inline(always)]`: only inlined code is compiled anew per instruction set.
#[inline(always)]
pub(super) fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Accumulators per reduction: enough for two AVX-512 registers, and a fixed order of summation on every machine.
const LANES: usize = 32;

#[inline(always)]
fn reduce(acc: [f32; LANES], fold: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    let mut acc = acc;
    while width > 0 {
        for i in 0..width {
            acc[i] = fold(acc[i], acc[i + width]);
        }
        width /= 2;
    }
    acc[0]
}

/// Σ f(aᵢ, bᵢ) over two slices of one length.
#[inline(always)]
pub(super) fn sum2(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut acc = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a_chunks.remainder(), b_chunks.remainder());
    for (x, y) in a_chunks.zip(b_chunks) {
        for i in 0..LANES {
            acc[i] += f(x[i], y[i]);
        }
    }
    for (i, (x, y)) in a_rest.iter().zip(b_rest).enumerate() {
        acc[i] += f(*x, *y);
    }
    reduce(acc, |x, y| x + y)
}

/// a · b.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum2(a, b, |x, y| x * y)
}

/// The largest element, or −∞ of an empty slice.
#[inline(always)]
pub(super) fn max(a: &[f32]) -> f32 {
    let fold = |x: f32, y: f32| if y > x { y } else { x };
    let mut acc = [f32::NEG_INFINITY; LANES];
    let chunks = a.chunks_exact(LANES);
    let rest = chunks.remainder();
    for x in chunks {
        for i in 0..LANES {
            acc[i] = fold(acc[i], x[i]);
        }
    }
    for (i, x) in rest.iter().enumerate() {
        acc[i] = fold(acc[i], *x);
    }
    reduce(acc, fold)
}

/// Replaces every xᵢ by e^((xᵢ − shift)·scale) and returns the sum of the results.
#[inline(always)]
pub(super) fn exp_in_place(x: &mut [f32], shift: f32, scale: f32) -> f32 {
    let mut acc = [0.0f32; LANES];
    let mut chunks = x.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            chunk[i] = exp((chunk[i] - shift) * scale);
            acc[i] += chunk[i];
        }
    }
    for (i, v) in chunks.into_remainder().iter_mut().enumerate() {
        *v = exp((*v - shift) * scale);
        acc[i] += *v;
    }
    reduce(acc, |x, y| x + y)
}

/// e^x without a call or a branch, relative error below 2e-7 on [−87, 88]; arguments are clamped to that range.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5·2²³ leaves the integer nearest to x·log₂e in the low bits of the sum.
    const MAGIC: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let power = shifted.to_bits().wrapping_sub(MAGIC.to_bits());
    let n = shifted - MAGIC;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let tail = 1.987_569_1e-4;
    let tail = tail * r + 1.398_199_9e-3;
    let tail = tail * r + 8.333_452e-3;
    let tail = tail * r + 4.166_579_6e-2;
    let tail = tail * r + 1.666_666_5e-1;
    let tail = tail * r + 0.5;
    let mantissa = tail * r * r + r + 1.0;
    let scale = f32::from_bits(power.wrapping_add(127) << 23);
    mantissa * scale
}

/// 1 / (1 + e^−x).
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_to_two_units_in_the_last_place() {
        for i in -8600..8700 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(relative < 2.4e-7, "exp({x}) is off by {relative}");
        }
    }

    #[test]
    fn reductions_cover_every_element_of_uneven_lengths() {
        for len in [0, 1, 31, 32, 33, 100] {
            let a: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let ones = vec![1.0; len];
            assert_eq!(dot(&a, &ones), (0..len).sum::<usize>() as f32);
            assert_eq!(max(&a), if len == 0 { f32::NEG_INFINITY } else { (len - 1) as f32 });
        }
    }
}
