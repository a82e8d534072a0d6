//! What goes wrong between us and the server: told apart by whether it helps to try again, and named in our words.

use std::borrow::Cow;
use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::postgres::PgDatabaseError;
use tokio::time::Instant;

use crate::StoreError;

/// A lost server is waited for this long: a restart of it goes unnoticed, a longer absence is told.
const PATIENCE: Duration = Duration::from_secs(3);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Why an operation did not succeed.
#[derive(Debug)]
pub(super) enum Fault {
    /// For the caller as it is.
    Refused(StoreError),
    /// From the server or the connection, before anything was committed.
    Sql(sqlx::Error),
    /// From the commit: it may have been made.
    Commit(sqlx::Error),
    /// No answer in time; the commit may have been made.
    Late(Duration),
}

impl From<StoreError> for Fault {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        Self::Sql(error)
    }
}

impl Fault {
    /// True where another transaction was faster with the same key.
    pub(super) fn is_duplicate(&self) -> bool {
        let Self::Sql(error) = self else { return false };
        error.as_database_error().is_some_and(DatabaseError::is_unique_violation)
    }

    /// True where the connection can be used again, after a rollback.
    pub(super) fn leaves_connection(&self) -> bool {
        match self {
            Self::Refused(_) => true,
            Self::Sql(error) | Self::Commit(error) => error.as_database_error().is_some() && !is_lost(error),
            Self::Late(_) => false,
        }
    }

    /// The same in our words.
    pub(super) fn named(self, database: &str) -> StoreError {
        let database = database.to_owned();
        let (error, may_be_made) = match self {
            Self::Refused(error) => return error,
            Self::Late(limit) => {
                let reason = format!("no answer for {} seconds", limit.as_secs());
                return StoreError::OutcomeUnknown { database, reason };
            }
            Self::Sql(error) => (error, false),
            Self::Commit(error) => (error, true),
        };
        if code(&error).is_some_and(|code| code == DISK_FULL) {
            return StoreError::DiskFull { database };
        }
        let reason = said(&error);
        match (is_lost(&error), may_be_made) {
            (false, _) => StoreError::Server { database, reason },
            (true, false) => StoreError::Unreachable { database, reason },
            (true, true) => StoreError::OutcomeUnknown { database, reason },
        }
    }
}

const DISK_FULL: &str = "53100";
/// Shutdown and crash of the server, its start, and no room for another connection.
const AWAY: [&str; 4] = ["57P01", "57P02", "57P03", "53300"];
/// Two transactions stood in each other's way: neither deadlock nor serialisation failure leaves anything behind.
const IN_THE_WAY: [&str; 2] = ["40001", "40P01"];

fn code(error: &sqlx::Error) -> Option<Cow<'_, str>> {
    error.as_database_error()?.code()
}

/// The server is not there, or no longer.
pub(super) fn is_lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => true,
        other => code(other).is_some_and(|code| AWAY.contains(&code.as_ref()) || code.starts_with("08")),
    }
}

/// The server's own words, without the query.
fn said(error: &sqlx::Error) -> String {
    match error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>()) {
        Some(error) => match error.detail() {
            Some(detail) => format!("{} ({detail})", error.message()),
            None => error.message().to_owned(),
        },
        None => error.to_string(),
    }
}

/// Whether a write that may have been made may be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// The second time changes nothing.
    Always,
    /// Only where it was certainly not made.
    IfNotMade,
}

/// How long one caller still waits for a server that is away.
#[derive(Debug)]
pub(super) struct Patience {
    until: Instant,
    pause: Duration,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self { until: Instant::now() + PATIENCE, pause: FIRST_PAUSE }
    }

    /// True after a pause if another try may help.
    pub(super) async fn allows(&mut self, fault: &Fault, again: Again) -> bool {
        let may_help = match fault {
            Fault::Sql(error) => is_lost(error) || code(error).is_some_and(|code| IN_THE_WAY.contains(&code.as_ref())),
            Fault::Commit(error) => again == Again::Always && is_lost(error),
            Fault::Refused(_) | Fault::Late(_) => false,
        };
        if !may_help || Instant::now() + self.pause > self.until {
            return false;
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken() -> sqlx::Error {
        sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())
    }

    #[tokio::test]
    async fn a_write_that_may_have_been_made_is_repeated_only_where_that_changes_nothing() {
        assert!(Patience::new().allows(&Fault::Sql(broken()), Again::IfNotMade).await);
        assert!(Patience::new().allows(&Fault::Commit(broken()), Again::Always).await);
        assert!(!Patience::new().allows(&Fault::Commit(broken()), Again::IfNotMade).await);
        assert!(!Patience::new().allows(&Fault::Refused(StoreError::Closed), Again::Always).await);
        assert!(matches!(Fault::Sql(broken()).named("d"), StoreError::Unreachable { .. }));
        assert!(matches!(Fault::Commit(broken()).named("d"), StoreError::OutcomeUnknown { .. }));
    }
}
