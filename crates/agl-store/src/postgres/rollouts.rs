//! Rollouts, the order in which they ended, and the change log.
//!
//! Whoever changes rollouts locks their rows first, in the order of their numbers, and the row of `heads` then: nobody waits in a
//! circle. What is numbered under that lock becomes visible in the order of its numbers.

use std::collections::{HashMap, HashSet};

use agl_core::rollout::{Consumed, Rollout, RolloutState, StatusPatch};
use sqlx::{PgConnection, Row};

use super::listener::CHANGES;
use super::{Fault, from_json, signed, to_json};
use crate::StoreError;
use crate::memory::terminal_item;
use crate::record::{Change, ChangeKind, RolloutQuery, TerminalItem, TerminalPage, run_id_of};

/// What a change came to, and the newest cursor of the change log if it wrote there.
pub(super) type Changed<T> = Result<(T, Option<u64>), Fault>;

pub(super) async fn create(sql: &mut PgConnection, rollouts: &[Rollout]) -> Changed<Vec<Rollout>> {
    let head: i64 = sqlx::query_scalar("SELECT rollout FROM heads FOR UPDATE").fetch_one(&mut *sql).await?;
    let ids: Vec<&str> = rollouts.iter().map(|rollout| rollout.rollout_id.as_str()).collect();
    let states: Vec<&str> = rollouts.iter().map(|rollout| rollout.status.state.as_str()).collect();
    let runs: Vec<Option<String>> = rollouts.iter().map(run_id_of).collect();
    let bodies = rollouts.iter().map(body_of).collect::<Result<Vec<_>, _>>()?;
    let new = sqlx::query_scalar::<_, String>(
        "INSERT INTO rollouts (number, rollout_id, state, run_id, body)
         SELECT $1 + new.place, new.rollout_id, new.state, new.run_id, new.body
         FROM unnest($2::text[], $3::text[], $4::text[], $5::text[])
              WITH ORDINALITY AS new (rollout_id, state, run_id, body, place)
         ORDER BY new.place
         ON CONFLICT (rollout_id) DO NOTHING RETURNING rollout_id",
    );
    let new: HashSet<String> = new
        .bind(head)
        .bind(&ids)
        .bind(states)
        .bind(runs)
        .bind(bodies)
        .fetch_all(&mut *sql)
        .await?
        .into_iter()
        .collect();
    let mut unlogged = new.clone();
    let in_order: Vec<&str> = ids.iter().copied().filter(|id| unlogged.remove(*id)).collect();
    let newest = if in_order.is_empty() {
        None
    } else {
        sqlx::query("UPDATE heads SET rollout = rollout + $1")
            .bind(signed(ids.len() as u64))
            .execute(&mut *sql)
            .await?;
        Some(log(sql, ChangeKind::Created, &in_order).await?)
    };
    let known = sqlx::query("SELECT rollout_id, body FROM rollouts WHERE rollout_id = ANY($1)").bind(&ids);
    let mut bodies: HashMap<String, String> = HashMap::new();
    for row in known.fetch_all(&mut *sql).await? {
        bodies.insert(row.try_get(0)?, row.try_get(1)?);
    }
    let answer = |id: &&str| {
        let body = bodies.get(*id).ok_or_else(|| StoreError::RolloutNotFound((*id).to_owned()))?;
        from_json(body, id)
    };
    Ok((ids.iter().map(answer).collect::<Result<_, StoreError>>()?, newest))
}

pub(super) async fn get(sql: &mut PgConnection, rollout_id: &str) -> Result<Option<Rollout>, Fault> {
    let body = sqlx::query_scalar::<_, String>("SELECT body FROM rollouts WHERE rollout_id = $1");
    let body = body.bind(rollout_id).fetch_optional(sql).await?;
    Ok(body.map(|body| from_json(&body, rollout_id)).transpose()?)
}

pub(super) async fn must_exist(sql: &mut PgConnection, rollout_id: &str) -> Result<(), Fault> {
    let found =
        sqlx::query("SELECT 1 FROM rollouts WHERE rollout_id = $1").bind(rollout_id).fetch_optional(sql).await?;
    found.map(|_| ()).ok_or_else(|| StoreError::RolloutNotFound(rollout_id.to_owned()).into())
}

/// As [`must_exist`], and it cannot be deleted before the transaction ends. Others may still change it.
pub(super) async fn must_stay(sql: &mut PgConnection, rollout_id: &str) -> Result<(), Fault> {
    let found = sqlx::query("SELECT 1 FROM rollouts WHERE rollout_id = $1 FOR KEY SHARE");
    let found = found.bind(rollout_id).fetch_optional(sql).await?;
    found.map(|_| ()).ok_or_else(|| StoreError::RolloutNotFound(rollout_id.to_owned()).into())
}

pub(super) async fn list(sql: &mut PgConnection, query: &RolloutQuery) -> Result<Vec<Rollout>, Fault> {
    let states: Vec<&str> = query.states.iter().map(|state| state.as_str()).collect();
    let after = match &query.after {
        Some(id) => sqlx::query_scalar::<_, i64>("SELECT number FROM rollouts WHERE rollout_id = $1")
            .bind(id)
            .fetch_optional(&mut *sql)
            .await?
            .ok_or_else(|| StoreError::RolloutNotFound(id.clone()))?,
        None => 0,
    };
    let bodies = sqlx::query_scalar::<_, String>(
        "SELECT body FROM rollouts
         WHERE state = ANY($1) AND number > $2 AND ($3::text IS NULL OR run_id = $3)
         ORDER BY number LIMIT $4",
    );
    let bodies =
        bodies.bind(states).bind(after).bind(&query.run_id).bind(signed(query.limit as u64)).fetch_all(sql).await?;
    Ok(bodies.iter().map(|body| from_json(body, "rollout")).collect::<Result<_, _>>()?)
}

pub(super) async fn patch(sql: &mut PgConnection, rollout_id: &str, patch: &StatusPatch, now: f64) -> Changed<Rollout> {
    let body = sqlx::query_scalar::<_, String>("SELECT body FROM rollouts WHERE rollout_id = $1 FOR NO KEY UPDATE");
    let body = body.bind(rollout_id).fetch_optional(&mut *sql).await?;
    let body = body.ok_or_else(|| StoreError::RolloutNotFound(rollout_id.to_owned()))?;
    let mut rollout: Rollout = from_json(&body, rollout_id)?;
    if patch.is_empty() {
        return Ok((rollout, None));
    }
    let was_terminal = rollout.status.state.is_terminal();
    rollout.apply(patch, now).map_err(StoreError::from)?;
    if rollout.status.state.is_terminal() && !was_terminal {
        let item = terminal_item(&rollout);
        let ended = sqlx::query(
            "WITH head AS (UPDATE heads SET terminal = terminal + 1 RETURNING terminal)
             INSERT INTO terminal_order (number, rollout_id, state, data_id, is_train)
             SELECT head.terminal, $1, $2, $3, $4 FROM head",
        );
        let ended = ended.bind(item.rollout_id).bind(item.state.as_str()).bind(item.data_id).bind(item.is_train);
        ended.execute(&mut *sql).await?;
    }
    update(sql, &rollout).await?;
    let newest = log(sql, ChangeKind::Updated, &[rollout_id]).await?;
    Ok((rollout, Some(newest)))
}

pub(super) async fn delete(sql: &mut PgConnection, rollout_id: &str) -> Changed<()> {
    // Waits for calls and events that are just being written: what they write is deleted too.
    let found = sqlx::query("SELECT 1 FROM rollouts WHERE rollout_id = $1 FOR UPDATE").bind(rollout_id);
    if found.fetch_optional(&mut *sql).await?.is_none() {
        return Ok(((), None));
    }
    let newest = log(sql, ChangeKind::Deleted, &[rollout_id]).await?;
    for statement in [
        "DELETE FROM blobs WHERE number IN (
             SELECT request FROM events WHERE rollout_id = $1 UNION ALL SELECT response FROM events WHERE rollout_id = $1)",
        "DELETE FROM events WHERE rollout_id = $1",
        "DELETE FROM calls WHERE rollout_id = $1",
        "DELETE FROM attempts WHERE rollout_id = $1",
        "DELETE FROM rollouts WHERE rollout_id = $1",
    ] {
        sqlx::query(statement).bind(rollout_id).execute(&mut *sql).await?;
    }
    Ok(((), Some(newest)))
}

pub(super) async fn terminal(sql: &mut PgConnection, after: u64, limit: usize) -> Result<TerminalPage, Fault> {
    let page = sqlx::query(
        "SELECT t.number, t.rollout_id, t.state, t.data_id, t.is_train, r.number IS NOT NULL
         FROM terminal_order t LEFT JOIN rollouts r ON r.rollout_id = t.rollout_id
         WHERE t.number > $1 ORDER BY t.number LIMIT $2",
    );
    let page = page.bind(signed(after)).bind(signed(limit as u64)).fetch_all(&mut *sql).await?;
    let (mut items, mut next_after) = (Vec::with_capacity(page.len()), after);
    for row in page {
        next_after = row.try_get::<i64, _>(0)?.cast_unsigned();
        if row.try_get(5)? {
            let state = row.try_get::<&str, _>(2)?;
            items.push(TerminalItem {
                rollout_id: row.try_get(1)?,
                // Written from the same enum; an unknown name can only come from a hand that edited the table.
                state: RolloutState::from_name(state).unwrap_or(RolloutState::Failed),
                data_id: row.try_get(3)?,
                is_train: row.try_get(4)?,
            });
        }
    }
    let total: i64 = sqlx::query_scalar("SELECT terminal FROM heads").fetch_one(sql).await?;
    Ok(TerminalPage { items, next_after, total_terminal: total.cast_unsigned() })
}

pub(super) async fn mark_consumed(sql: &mut PgConnection, mark: &Consumed, rollout_ids: &[String]) -> Changed<u64> {
    let found = sqlx::query_scalar::<_, String>(
        "SELECT body FROM rollouts WHERE rollout_id = ANY($1) ORDER BY number FOR NO KEY UPDATE",
    );
    let found = found.bind(rollout_ids).fetch_all(&mut *sql).await?;
    let mut rollouts: HashMap<String, Rollout> = HashMap::new();
    for body in found {
        let rollout: Rollout = from_json(&body, "rollout")?;
        rollouts.insert(rollout.rollout_id.clone(), rollout);
    }
    let (mut marked, mut changed) = (0, Vec::new());
    for rollout_id in rollout_ids {
        let Some(rollout) = rollouts.get_mut(rollout_id) else { continue };
        marked += 1;
        if rollout.consumed.as_ref() != Some(mark) {
            rollout.consumed = Some(mark.clone());
            update(sql, rollout).await?;
            changed.push(rollout_id.as_str());
        }
    }
    let newest = if changed.is_empty() { None } else { Some(log(sql, ChangeKind::Consumed, &changed).await?) };
    Ok((marked, newest))
}

pub(super) async fn changes(sql: &mut PgConnection, after: u64, limit: usize) -> Result<Vec<Change>, Fault> {
    let rows = sqlx::query(
        "SELECT c.cursor, c.kind, c.rollout_id, r.body
         FROM changes c LEFT JOIN rollouts r ON r.rollout_id = c.rollout_id
         WHERE c.cursor > $1 ORDER BY c.cursor LIMIT $2",
    );
    let rows = rows.bind(signed(after)).bind(signed(limit as u64)).fetch_all(sql).await?;
    let mut changes = Vec::with_capacity(rows.len());
    for row in rows {
        let kind = row.try_get::<&str, _>(1)?;
        let rollout_id: String = row.try_get(2)?;
        let body = row.try_get::<Option<&str>, _>(3)?;
        changes.push(Change {
            cursor: row.try_get::<i64, _>(0)?.cast_unsigned(),
            kind: ChangeKind::ALL
                .into_iter()
                .find(|known| known.as_str() == kind)
                .ok_or_else(|| super::corrupt("change log", "a change of unknown kind"))?,
            rollout: body.map(|body| from_json(body, &rollout_id)).transpose()?,
            rollout_id,
        });
    }
    Ok(changes)
}

async fn update(sql: &mut PgConnection, rollout: &Rollout) -> Result<(), Fault> {
    let update = sqlx::query("UPDATE rollouts SET state = $2, body = $3 WHERE rollout_id = $1");
    let update = update.bind(&rollout.rollout_id).bind(rollout.status.state.as_str()).bind(body_of(rollout)?);
    update.execute(sql).await?;
    Ok(())
}

/// Appends one change for each rollout, and tells every gateway once this is committed. Gives the newest cursor.
async fn log(sql: &mut PgConnection, kind: ChangeKind, rollout_ids: &[&str]) -> Result<u64, Fault> {
    let logged = sqlx::query_scalar::<_, i64>(
        "WITH head AS (UPDATE heads SET change = change + cardinality($2::text[]) RETURNING change),
              logged AS (INSERT INTO changes (cursor, kind, rollout_id)
                         SELECT head.change - cardinality($2::text[]) + new.place, $1, new.rollout_id
                         FROM head, unnest($2::text[]) WITH ORDINALITY AS new (rollout_id, place))
         SELECT head.change FROM head, pg_notify($3, head.change::text)",
    );
    let newest = logged.bind(kind.as_str()).bind(rollout_ids).bind(CHANGES).fetch_one(sql).await?;
    Ok(newest.cast_unsigned())
}

fn body_of(rollout: &Rollout) -> Result<String, StoreError> {
    to_json(rollout, &rollout.rollout_id)
}
