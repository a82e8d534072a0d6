//! The way of a model call: from the harness to an inference server and back.
//!
//! 1. [`entry`] checks who calls, and has the body translated from the harness's dialect ([`crate::dialect`], [`request`]).
//! 2. [`upstream`] passes the gate, picks a server of the model that [`routes`] name ([`servers`]) and sends in the form that
//!    its [`kind`] takes, again if need be.
//! 3. [`answer`] finds token ids, log-probs and versions in what came back.
//! 4. [`recorder`] writes [`event`], rows and bodies in one transaction, as the [`attempt_tree`] says.
//! 5. Only then the answer leaves, in the harness's dialect, and [`reply`] tells the recorder whether it was taken.
//!
//! Steps 2 to 4 run in a task of their own ([`call`]): when the harness hangs up, they go on for a while, and an equal call
//! takes its place ([`flights`]).

use axum::extract::{FromRequest, Request};
use bytes::Bytes;

use crate::app::App;
use crate::error::ApiError;

pub(crate) mod answer;
pub(crate) mod aside;
pub(crate) mod attempt_tree;
pub(crate) mod call;
pub(crate) mod count;
pub(crate) mod entry;
pub(crate) mod event;
pub(crate) mod flights;
pub(crate) mod kind;
pub(crate) mod models;
pub(crate) mod recorder;
pub(crate) mod reply;
pub(crate) mod request;
pub(crate) mod routes;
pub(crate) mod servers;
pub(crate) mod upstream;
pub(crate) mod verbatim;

/// Bodies larger than this are read and written on a blocking thread.
const LARGE_BODY_BYTES: usize = 256 * 1024;

/// The whole body, up to the limit.
pub(crate) async fn read_body(app: &App, request: Request) -> Result<Bytes, ApiError> {
    Bytes::from_request(request, &()).await.map_err(|rejection| {
        if rejection.status() == axum::http::StatusCode::PAYLOAD_TOO_LARGE {
            let limit = app.config.body_limit;
            ApiError::new(rejection.status(), format!("Request body is larger than {limit} bytes; raise `body_limit`"))
        } else {
            ApiError::bad_request("The request body broke off")
        }
    })
}
