//! Models, the pause, and secrets.

use rusqlite::params;

use super::{Sql, corrupt, from_json, to_json};
use crate::StoreError;
use crate::record::{Pause, RegisteredModel};

const PAUSE: &str = "pause";

pub(super) fn put_model(sql: &Sql<'_>, model: &RegisteredModel) -> Result<(), StoreError> {
    sql.run(
        "INSERT INTO models (model, endpoint, body) VALUES (?1, ?2, ?3)
         ON CONFLICT (model, endpoint) DO UPDATE SET body = excluded.body",
        params![model.model, model.endpoint, to_json(model, "model")?],
    )?;
    Ok(())
}

pub(super) fn delete_models(sql: &Sql<'_>, model: &str, endpoint: Option<&str>) -> Result<(), StoreError> {
    sql.run("DELETE FROM models WHERE model = ?1 AND (?2 IS NULL OR endpoint = ?2)", params![model, endpoint])?;
    Ok(())
}

pub(super) fn models(sql: &Sql<'_>) -> Result<Vec<RegisteredModel>, StoreError> {
    let bodies = sql.all("SELECT body FROM models ORDER BY model, endpoint", [], |row| row.get::<_, String>(0))?;
    bodies.iter().map(|body| from_json(body, "model")).collect()
}

pub(super) fn put_pause(sql: &Sql<'_>, before: Option<&Pause>, after: Option<&Pause>) -> Result<bool, StoreError> {
    if pause(sql)?.as_ref() != before {
        return Ok(false);
    }
    match after {
        Some(after) => put(sql, PAUSE, to_json(after, PAUSE)?.as_bytes())?,
        None => sql.run("DELETE FROM settings WHERE name = ?1", [PAUSE]).map(|_| ())?,
    }
    Ok(true)
}

pub(super) fn pause(sql: &Sql<'_>) -> Result<Option<Pause>, StoreError> {
    let stored = get(sql, PAUSE)?;
    stored.map(|json| serde_json::from_slice(&json).map_err(|error| corrupt(PAUSE, error))).transpose()
}

pub(super) fn secret(sql: &Sql<'_>, name: &'static str, fresh: [u8; 32]) -> Result<[u8; 32], StoreError> {
    if let Some(known) = get(sql, name)? {
        return known.try_into().map_err(|_| corrupt(name, "it is not 32 bytes long"));
    }
    put(sql, name, &fresh)?;
    Ok(fresh)
}

fn put(sql: &Sql<'_>, name: &str, value: &[u8]) -> Result<(), StoreError> {
    sql.run(
        "INSERT INTO settings (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        params![name, value],
    )?;
    Ok(())
}

fn get(sql: &Sql<'_>, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
    sql.first("SELECT value FROM settings WHERE name = ?1", [name], |row| row.get(0))
}
