//! Why the gateway does not start, and what a caller is answered when it cannot do what it was asked.

use agl_store::StoreError;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Why the gateway does not start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A setting cannot be used.
    #[error("gateway setting {name}: {problem}")]
    Setting {
        /// Its name in the configuration.
        name: &'static str,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// Another process has the port.
    #[error(
        "{address} is in use by another process. Stop that one (is another gateway running?), or set `listen` to another \
         port; port 0 takes a free one"
    )]
    AddressInUse {
        /// The address asked for.
        address: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {reason}. Set `listen` to ADDRESS:PORT of this machine")]
    CannotListen {
        /// The address asked for.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// Without a key, anybody who reaches the address could read and change everything.
    #[error(
        "{address} can be reached from other machines and no key is set. Set `key`, listen on 127.0.0.1, or set \
         `allow_unauthenticated = true` if the network is closed"
    )]
    NoKey {
        /// The address asked for.
        address: String,
    },
    /// The store cannot be opened or used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The HTTP client for inference servers cannot be made.
    #[error("cannot make the HTTP client for inference servers: {0}")]
    Client(reqwest::Error),
    /// The metrics cannot be set up.
    #[error("cannot set up the metrics: {0}")]
    Metrics(#[from] metrics_exporter_prometheus::BuildError),
    /// The server stopped by itself.
    #[error("the gateway stopped serving: {0}")]
    Serve(std::io::Error),
}

/// An answer with an error status; its body is `{"detail": …}`, as FastAPI gives it.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub(crate) status: StatusCode,
    /// What a caller gets.
    pub(crate) body: Value,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, detail: impl Into<Value>) -> Self {
        Self::with_body(status, json!({"detail": detail.into()}))
    }

    pub(crate) fn with_body(status: StatusCode, body: Value) -> Self {
        Self { status, body, headers: Vec::new() }
    }

    pub(crate) fn not_found(rollout_id: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("Rollout not found: {rollout_id}"))
    }

    pub(crate) fn bad_request(detail: impl Into<Value>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(crate) fn conflict(detail: impl Into<Value>) -> Self {
        Self::new(StatusCode::CONFLICT, detail)
    }

    pub(crate) fn forbidden(detail: impl Into<Value>) -> Self {
        Self::new(StatusCode::FORBIDDEN, detail)
    }

    /// What a call is told that the gateway can no longer make.
    pub(crate) fn stopping() -> Self {
        let what = "The gateway is stopping; try again when it is back";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, what).retry_after(1)
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Invalid or missing API key")
    }

    /// One FastAPI validation error: where, what, and of which type.
    pub(crate) fn invalid(loc: Vec<Value>, msg: impl Into<String>, kind: &str) -> Self {
        let detail = json!([{"type": kind, "loc": loc, "msg": msg.into()}]);
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, detail)
    }

    /// The same in other words: status and headers stay.
    pub(crate) fn say(mut self, body: Value) -> Self {
        self.body = body;
        self
    }

    pub(crate) fn retry_after(mut self, seconds: u64) -> Self {
        self.headers.push((header::RETRY_AFTER, HeaderValue::from(seconds)));
        self
    }

    pub(crate) fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((HeaderName::from_static(name), HeaderValue::from_static(value)));
        self
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let status = match &error {
            StoreError::RolloutNotFound(_) | StoreError::AttemptNotFound { .. } => StatusCode::NOT_FOUND,
            StoreError::Illegal(_) => StatusCode::CONFLICT,
            StoreError::DiskFull { .. } => StatusCode::INSUFFICIENT_STORAGE,
            StoreError::Closed | StoreError::Unreachable { .. } | StoreError::Raced { .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            // 503 says that nothing was done.
            StoreError::OutcomeUnknown { .. } => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if status.is_server_error() {
            tracing::error!(%error, "the store failed");
        }
        let told = Self::new(status, error.to_string());
        if status == StatusCode::SERVICE_UNAVAILABLE { told.retry_after(1) } else { told }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body)).into_response();
        for (name, value) in self.headers {
            response.headers_mut().insert(name, value);
        }
        response
    }
}
