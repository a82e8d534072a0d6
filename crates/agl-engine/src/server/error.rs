//! Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::EngineError;

/// An error answer.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    /// 400: the request's field `param` is at fault.
    pub(super) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into(), param: Some(param.into()), code: None }
    }

    /// The same error with its field under the name that `from` goes by in this kind of request.
    pub(super) fn renamed(mut self, from: &str, to: &str) -> Self {
        if self.param.as_deref() == Some(from) {
            self.param = Some(to.to_owned());
        }
        self
    }

    /// 400: the body as a whole is at fault.
    pub(super) fn bad_body(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into(), param: None, code: None }
    }

    pub(super) fn not_found() -> Self {
        let message = "no such path; this server has /v1/chat/completions, /v1/completions, /v1/models and /health";
        Self { status: StatusCode::NOT_FOUND, message: message.to_owned(), param: None, code: None }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        let (status, param, code) = match &error {
            EngineError::Request { param, .. } => (StatusCode::BAD_REQUEST, *param, None),
            EngineError::PromptTooLong { .. } => {
                (StatusCode::BAD_REQUEST, Some("messages"), Some("context_length_exceeded"))
            }
            EngineError::ChatTemplate(_) => (StatusCode::BAD_REQUEST, Some("messages"), None),
            EngineError::SamplerStopped => (StatusCode::SERVICE_UNAVAILABLE, None, None),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, None, None),
        };
        if status.is_server_error() {
            tracing::error!(%error, "a request failed");
        }
        Self { status, message, param: param.map(str::to_owned), code }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let kind = if self.status.is_client_error() { "invalid_request_error" } else { "server_error" };
        let error = json!({"message": self.message, "type": kind, "param": self.param, "code": self.code});
        (self.status, Json(json!({ "error": error }))).into_response()
    }
}
