//! The way of a model call: from the harness to an inference server and back.
//!
//! 1. [`entry`] checks who calls, and has the body translated from the harness's dialect ([`crate::dialect`], [`request`]).
//! 2. [`upstream`] passes the gate, picks a server of the model that [`routes`] name ([`servers`]) and sends in the form that
//!    its [`kind`] takes, again if need be. llama.cpp's server has a form of its own ([`llamacpp`]).
//! 3. [`answer`] finds token ids, log-probs and versions in what came back.
//! 4. [`recorder`] writes [`event`], rows and bodies in one transaction, as the [`attempt_tree`] says;
//!    [`deliveries`] notes which answers left.
//! 5. Only then the answer leaves, in the harness's dialect, and [`reply`] tells the recorder whether it was taken.
//!
//! A server that is registered so streams [`through`]: its words leave as they come ([`live`]), and the last of them after step 4.
//!
//! Steps 2 to 4 run in a task of their own ([`call`]): when the harness hangs up, they go on for a while, and an equal call
//! takes its place ([`flights`]).

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;

use crate::app::App;
use crate::config::duration;
use crate::error::ApiError;

pub(crate) mod answer;
pub(crate) mod aside;
pub(crate) mod attempt_tree;
pub(crate) mod call;
pub(crate) mod count;
pub(crate) mod deliveries;
pub(crate) mod entry;
pub(crate) mod event;
pub(crate) mod flights;
pub(crate) mod kind;
pub(crate) mod live;
pub(crate) mod llamacpp;
pub(crate) mod models;
pub(crate) mod places;
pub(crate) mod recorder;
pub(crate) mod reply;
pub(crate) mod request;
pub(crate) mod routes;
pub(crate) mod servers;
pub(crate) mod through;
pub(crate) mod upstream;
pub(crate) mod verbatim;

/// Bodies larger than this are read and written on a blocking thread.
const LARGE_BODY_BYTES: usize = 256 * 1024;

/// The whole body, up to the limit and in the time there is for it.
pub(crate) async fn read_body(app: &App, request: Request) -> Result<Bytes, ApiError> {
    let seconds = app.config.limits.body_timeout_seconds;
    let read = tokio::time::timeout(duration(seconds), read_in_time(app.config.body_limit, request)).await;
    read.unwrap_or_else(|_| {
        let late =
            format!("The request body did not come within {seconds} seconds; raise `limits.body_timeout_seconds`");
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, late))
    })
}

async fn read_in_time(limit: usize, request: Request) -> Result<Bytes, ApiError> {
    let too_large = || {
        let what = format!("Request body is larger than {limit} bytes; raise `body_limit`");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, what)
    };
    let announced = announced(request.headers());
    if announced > limit && request.headers().contains_key(header::EXPECT) {
        // It asks first, and sends nothing then.
        return Err(too_large());
    }
    let mut chunks = request.into_body().into_data_stream();
    let (mut whole, mut length) = (Bytes::new(), 0_usize);
    let mut many = BytesMut::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| ApiError::bad_request("The request body broke off"))?;
        length += chunk.len();
        if length > limit {
            // A client that still sends would not read the refusal: a body not much too large is taken in and dropped.
            (whole, many) = Default::default();
            if length > limit.saturating_mul(2) {
                break;
            }
        } else if whole.is_empty() && many.is_empty() {
            whole = chunk;
        } else {
            if many.is_empty() {
                many.reserve(announced.clamp(length, limit));
                many.extend_from_slice(&std::mem::take(&mut whole));
            }
            many.extend_from_slice(&chunk);
        }
    }
    match (length > limit, many.is_empty()) {
        (true, _) => Err(too_large()),
        (false, true) => Ok(whole),
        (false, false) => Ok(many.freeze()),
    }
}

/// The length that the caller says its body has; 0 where it does not say.
fn announced(headers: &HeaderMap) -> usize {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    length.unwrap_or(0)
}
