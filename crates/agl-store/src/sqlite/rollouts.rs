//! Rollouts, the order in which they ended, and the change log.

use agl_core::rollout::{Consumed, Rollout, RolloutState, StatusPatch};
use rusqlite::params;

use super::{Sql, corrupt, from_json, signed, to_json};
use crate::StoreError;
use crate::memory::terminal_item;
use crate::record::{Change, ChangeKind, RolloutQuery, TerminalItem, TerminalPage, run_id_of};

pub(super) fn create(sql: &Sql<'_>, new: Vec<Rollout>) -> Result<Vec<Rollout>, StoreError> {
    // All are read before any is written: one that cannot be read concerns nobody else.
    for rollout in &new {
        get(sql, &rollout.rollout_id)?;
    }
    new.into_iter().map(|rollout| create_one(sql, rollout)).collect()
}

fn create_one(sql: &Sql<'_>, rollout: Rollout) -> Result<Rollout, StoreError> {
    if let Some(known) = get(sql, &rollout.rollout_id)? {
        return Ok(known);
    }
    sql.run(
        "INSERT INTO rollouts (rollout_id, state, run_id, body) VALUES (?1, ?2, ?3, ?4)",
        params![rollout.rollout_id, rollout.status.state.as_str(), run_id_of(&rollout), body_of(&rollout)?],
    )?;
    log(sql, ChangeKind::Created, &rollout.rollout_id)?;
    Ok(rollout)
}

pub(super) fn get(sql: &Sql<'_>, rollout_id: &str) -> Result<Option<Rollout>, StoreError> {
    let body =
        sql.first("SELECT body FROM rollouts WHERE rollout_id = ?1", [rollout_id], |row| row.get::<_, String>(0))?;
    body.map(|body| from_json(&body, rollout_id)).transpose()
}

pub(super) fn must_exist(sql: &Sql<'_>, rollout_id: &str) -> Result<(), StoreError> {
    sql.first("SELECT 1 FROM rollouts WHERE rollout_id = ?1", [rollout_id], |_| Ok(()))?
        .ok_or_else(|| StoreError::RolloutNotFound(rollout_id.to_owned()))
}

pub(super) fn list(sql: &Sql<'_>, query: &RolloutQuery) -> Result<Vec<Rollout>, StoreError> {
    // Static SQL has a fixed number of places: each state once, and the last repeated until they are filled.
    let mut states: Vec<_> = RolloutState::ALL.into_iter().filter(|state| query.states.contains(state)).collect();
    let Some(&last) = states.last() else { return Ok(Vec::new()) };
    states.resize(RolloutState::ALL.len(), last);
    let after = match &query.after {
        Some(id) => sql
            .first("SELECT number FROM rollouts WHERE rollout_id = ?1", [id], |row| row.get::<_, i64>(0))?
            .ok_or_else(|| StoreError::RolloutNotFound(id.clone()))?,
        None => 0,
    };
    let rows = sql.all(
        "SELECT body FROM rollouts
         WHERE state IN (?1, ?2, ?3, ?4) AND number > ?5 AND (?6 IS NULL OR run_id = ?6)
         ORDER BY number LIMIT ?7",
        params![
            states[0].as_str(),
            states[1].as_str(),
            states[2].as_str(),
            states[3].as_str(),
            after,
            query.run_id,
            signed(query.limit as u64)
        ],
        |row| row.get::<_, String>(0),
    )?;
    rows.iter().map(|body| from_json(body, "rollout")).collect()
}

pub(super) fn patch(sql: &Sql<'_>, rollout_id: &str, patch: &StatusPatch, now: f64) -> Result<Rollout, StoreError> {
    let mut rollout = get(sql, rollout_id)?.ok_or_else(|| StoreError::RolloutNotFound(rollout_id.to_owned()))?;
    if patch.is_empty() {
        return Ok(rollout);
    }
    let was_terminal = rollout.status.state.is_terminal();
    rollout.apply(patch, now)?;
    update(sql, &rollout)?;
    if rollout.status.state.is_terminal() && !was_terminal {
        let item = terminal_item(&rollout);
        sql.run(
            "INSERT INTO terminal_order (rollout_id, state, data_id, is_train) VALUES (?1, ?2, ?3, ?4)",
            params![item.rollout_id, item.state.as_str(), item.data_id, item.is_train],
        )?;
    }
    log(sql, ChangeKind::Updated, rollout_id)?;
    Ok(rollout)
}

pub(super) fn delete(sql: &Sql<'_>, rollout_id: &str) -> Result<(), StoreError> {
    if sql.run("DELETE FROM rollouts WHERE rollout_id = ?1", [rollout_id])? == 0 {
        return Ok(());
    }
    for statement in [
        "DELETE FROM events WHERE attempt IN (SELECT number FROM attempts WHERE rollout_id = ?1)",
        "DELETE FROM deliveries WHERE attempt IN (SELECT number FROM attempts WHERE rollout_id = ?1)",
    ] {
        sql.run(statement, [rollout_id])?;
    }
    sql.run("DELETE FROM attempts WHERE rollout_id = ?1", [rollout_id])?;
    sql.run("DELETE FROM terminal_order WHERE rollout_id = ?1", [rollout_id])?;
    // Whoever resumes a watch before them learns from the deletion all that they could still say.
    sql.run("DELETE FROM changes WHERE rollout_id = ?1", [rollout_id])?;
    log(sql, ChangeKind::Deleted, rollout_id)?;
    forget_old_deletions(sql)
}

/// How many deletions the change log keeps. A watch that resumes from further back is not told of those before.
const KEPT_DELETIONS: i64 = 100_000;

/// Keeps the change log from growing for ever. Two at a time: it shrinks while one is added.
fn forget_old_deletions(sql: &Sql<'_>) -> Result<(), StoreError> {
    sql.run(
        "DELETE FROM changes WHERE cursor IN (
             SELECT cursor FROM changes WHERE kind = 'deleted' AND cursor <= (SELECT max(cursor) FROM changes) - ?1
             ORDER BY cursor LIMIT 2)",
        [KEPT_DELETIONS],
    )?;
    Ok(())
}

/// Numbers have no gaps but those of deleted rollouts, so that a page is a range of them: as if the deleted were still there.
pub(super) fn terminal(sql: &Sql<'_>, after: u64, limit: usize) -> Result<TerminalPage, StoreError> {
    // The highest number ever given, also where its rollout has been deleted.
    let total =
        sql.first("SELECT seq FROM sqlite_sequence WHERE name = 'terminal_order'", [], |row| row.get::<_, i64>(0))?;
    let total = total.unwrap_or(0).cast_unsigned();
    let last = after.saturating_add(limit as u64).min(total);
    let items = sql.all(
        // Files of earlier versions kept the entries of deleted rollouts.
        "SELECT t.rollout_id, t.state, t.data_id, t.is_train
         FROM terminal_order t JOIN rollouts r ON r.rollout_id = t.rollout_id
         WHERE t.number > ?1 AND t.number <= ?2 ORDER BY t.number",
        [signed(after), signed(last)],
        |row| {
            let state: String = row.get(1)?;
            Ok(TerminalItem {
                rollout_id: row.get(0)?,
                // Written from the same enum; an unknown name can only come from a hand that edited the file.
                state: RolloutState::from_name(&state).unwrap_or(RolloutState::Failed),
                data_id: row.get(2)?,
                is_train: row.get(3)?,
            })
        },
    )?;
    Ok(TerminalPage { items, next_after: last.max(after), total_terminal: total })
}

pub(super) fn mark_consumed(sql: &Sql<'_>, mark: &Consumed, rollout_ids: &[String]) -> Result<u64, StoreError> {
    // All are read before any is written: one that cannot be read concerns nobody else.
    let found: Vec<Option<Rollout>> = rollout_ids.iter().map(|id| get(sql, id)).collect::<Result<_, _>>()?;
    let mut marked = 0;
    for mut rollout in found.into_iter().flatten() {
        marked += 1;
        if rollout.consumed.as_ref() != Some(mark) {
            rollout.consumed = Some(mark.clone());
            update(sql, &rollout)?;
            log(sql, ChangeKind::Consumed, &rollout.rollout_id)?;
        }
    }
    Ok(marked)
}

pub(super) fn changes(sql: &Sql<'_>, after: u64, limit: usize) -> Result<Vec<Change>, StoreError> {
    let rows = sql.all(
        "SELECT c.cursor, c.kind, c.rollout_id, r.body
         FROM changes c LEFT JOIN rollouts r ON r.rollout_id = c.rollout_id
         WHERE c.cursor > ?1 ORDER BY c.cursor LIMIT ?2",
        params![signed(after), signed(limit as u64)],
        |row| {
            Ok((
                row.get::<_, i64>(0)?,
                row.get::<_, String>(1)?,
                row.get::<_, String>(2)?,
                row.get::<_, Option<String>>(3)?,
            ))
        },
    )?;
    rows.into_iter()
        .map(|(cursor, kind, rollout_id, body)| {
            let kind = ChangeKind::ALL.into_iter().find(|known| known.as_str() == kind);
            Ok(Change {
                cursor: cursor.cast_unsigned(),
                kind: kind.ok_or_else(|| corrupt("change log", "a change of unknown kind"))?,
                rollout: body.map(|body| from_json(&body, &rollout_id)).transpose()?,
                rollout_id,
            })
        })
        .collect()
}

fn update(sql: &Sql<'_>, rollout: &Rollout) -> Result<(), StoreError> {
    sql.run(
        "UPDATE rollouts SET state = ?2, body = ?3 WHERE rollout_id = ?1",
        params![rollout.rollout_id, rollout.status.state.as_str(), body_of(rollout)?],
    )?;
    Ok(())
}

fn log(sql: &Sql<'_>, kind: ChangeKind, rollout_id: &str) -> Result<(), StoreError> {
    sql.run("INSERT INTO changes (kind, rollout_id) VALUES (?1, ?2)", params![kind.as_str(), rollout_id])?;
    Ok(())
}

fn body_of(rollout: &Rollout) -> Result<String, StoreError> {
    to_json(rollout, &rollout.rollout_id)
}
