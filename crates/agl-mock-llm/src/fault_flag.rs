//! Faults as the command line writes them: `KIND[=VALUE][@NUMBER,NUMBER… | %PROBABILITY]`.

use crate::script::{Fault, FaultRule};

/// Reads `503@0,1`, `429=2%0.1` (`Retry-After: 2`), `delay=1.5`, `reset%0.05`, `hang@4`, `truncated`, `wrong_json`,
/// `missing_ids`, `missing_logprobs`, `count_mismatch`, `lost_ids`. Without a position or probability it strikes every request.
///
/// # Errors
/// What is wrong with it, and what it should look like.
pub fn parse(flag: &str) -> Result<FaultRule, String> {
    let (head, at, probability) = if let Some((head, positions)) = flag.split_once('@') {
        let at = positions.split(',').map(|position| position.trim().parse::<u64>()).collect::<Result<Vec<_>, _>>();
        (head, at.map_err(|_| format!("{positions:?} in {flag:?} is not a list of request numbers such as 0,3"))?, 0.0)
    } else if let Some((head, probability)) = flag.split_once('%') {
        let value = probability.parse::<f64>().ok().filter(|value| (0.0..=1.0).contains(value));
        (
            head,
            Vec::new(),
            value.ok_or_else(|| format!("{probability:?} in {flag:?} is not a probability between 0 and 1"))?,
        )
    } else {
        (flag, Vec::new(), 1.0)
    };
    let (kind, value) = head.split_once('=').map_or((head, None), |(kind, value)| (kind, Some(value)));
    let fault = match kind {
        "delay" => {
            let seconds = value.and_then(|value| value.parse::<f64>().ok()).filter(|seconds| *seconds >= 0.0);
            Fault::Delay { seconds: seconds.ok_or_else(|| format!("{flag:?} needs seconds: delay=1.5"))? }
        }
        "reset" => Fault::Reset,
        "wrong_json" => Fault::WrongJson,
        "truncated" => Fault::Truncated,
        "missing_ids" => Fault::MissingIds,
        "missing_logprobs" => Fault::MissingLogprobs,
        "count_mismatch" => Fault::CountMismatch,
        "lost_ids" => Fault::LostIds,
        "hang" => Fault::Hang,
        status => match (status.parse::<u16>(), value.map(str::parse::<u64>).transpose()) {
            (Ok(status @ 400..=599), Ok(retry_after)) => Fault::Status { status, retry_after },
            _ => {
                return Err(format!(
                    "{kind:?} in {flag:?} is no fault; there are: an error status such as 503 or 429=2 (Retry-After), \
                     delay=SECONDS, reset, wrong_json, truncated, missing_ids, missing_logprobs, count_mismatch, lost_ids, hang"
                ));
            }
        },
    };
    Ok(FaultRule { fault, at, probability })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_name_a_fault_and_whom_it_strikes() {
        assert_eq!(
            parse("429=2@0,3").unwrap(),
            FaultRule::at(Fault::Status { status: 429, retry_after: Some(2) }, [0, 3])
        );
        assert_eq!(parse("reset%0.25").unwrap(), FaultRule::with_probability(Fault::Reset, 0.25));
        assert_eq!(parse("delay=1.5").unwrap(), FaultRule::with_probability(Fault::Delay { seconds: 1.5 }, 1.0));
    }

    #[test]
    fn a_wrong_flag_is_refused_with_what_it_should_be() {
        assert!(parse("sulk").unwrap_err().contains("missing_ids"));
        assert!(parse("200").unwrap_err().contains("is no fault"));
        assert!(parse("reset%2").unwrap_err().contains("between 0 and 1"));
        assert!(parse("hang@x").unwrap_err().contains("request numbers"));
        assert!(parse("delay").unwrap_err().contains("delay=1.5"));
    }
}
