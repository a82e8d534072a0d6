//! Every read of the store over rows that hold anything; see [`crate::fuzz`].

use std::path::Path;

use rusqlite::Connection;

use super::{Sql, attempts, calls, events, rollouts, schema, settings};
use crate::RolloutQuery;

/// A database in memory with our tables.
pub(crate) fn empty() -> Connection {
    #[expect(clippy::expect_used, reason = "a fuzzer that cannot be set up has failed")]
    let mut connection = Connection::open_in_memory().expect("a database in memory can be opened");
    #[expect(clippy::expect_used, reason = "likewise")]
    schema::prepare(&mut connection, Path::new("fuzz")).expect("it is empty");
    connection
}

/// Whatever a read gives or refuses is well.
pub(crate) fn read_all(connection: &Connection) {
    let sql = &Sql { connection, path: Path::new("fuzz") };
    let query =
        RolloutQuery { states: agl_core::rollout::RolloutState::ALL.to_vec(), limit: 10, ..RolloutQuery::default() };
    let _refused = (
        rollouts::get(sql, "r"),
        rollouts::list(sql, &query),
        rollouts::terminal(sql, 0, 10),
        rollouts::changes(sql, 0, 10),
        attempts::list(sql, "r"),
        attempts::get(sql, "r", "0"),
        settings::models(sql),
        settings::pause(sql),
        settings::secret(sql, "secret", [0; 32]),
    );
    for event in events::list(sql, "r", "0", None).into_iter().flatten() {
        let _refused = event.into_event();
    }
    let Ok(stored) = calls::list(sql, "r", "0", 0) else { return };
    let mut tree = agl_core::trajectory::TokenTree::new();
    for call in stored {
        if tree.insert(call.row).is_err() {
            return;
        }
    }
    for level in [agl_core::trajectory::Level::Trajectory, agl_core::trajectory::Level::Transition] {
        let _rows = tree.sequences(level);
    }
}
