//! Models, the pause, and secrets. What all gateways must know before it counts raises the epoch of their agreement.

use sqlx::{PgConnection, Row};

use super::listener::AGREEMENT;
use super::{Fault, corrupt, from_json, to_json};
use crate::StoreError;
use crate::record::{Pause, RegisteredModel};

const PAUSE: &str = "pause";

/// Raises the epoch, and tells every gateway once this is committed. Whoever does so holds the agreement until it commits.
async fn agree_anew(sql: &mut PgConnection) -> Result<(), Fault> {
    let raise = sqlx::query(
        "WITH raised AS (UPDATE agreement SET epoch = epoch + 1 RETURNING epoch)
         SELECT pg_notify($1, epoch::text) FROM raised",
    );
    raise.bind(AGREEMENT).execute(sql).await?;
    Ok(())
}

pub(super) async fn put_models(sql: &mut PgConnection, models: &[RegisteredModel]) -> Result<(), Fault> {
    agree_anew(sql).await?;
    for model in models {
        let put = sqlx::query(
            "INSERT INTO models (model, endpoint, body) VALUES ($1, $2, $3)
             ON CONFLICT (model, endpoint) DO UPDATE SET body = excluded.body",
        );
        put.bind(&model.model).bind(&model.endpoint).bind(to_json(model, "model")?).execute(&mut *sql).await?;
    }
    Ok(())
}

pub(super) async fn delete_models(sql: &mut PgConnection, model: &str, endpoint: Option<&str>) -> Result<(), Fault> {
    agree_anew(sql).await?;
    let delete = sqlx::query("DELETE FROM models WHERE model = $1 AND ($2::text IS NULL OR endpoint = $2)");
    delete.bind(model).bind(endpoint).execute(sql).await?;
    Ok(())
}

pub(super) async fn models(sql: &mut PgConnection) -> Result<Vec<RegisteredModel>, Fault> {
    let bodies =
        sqlx::query_scalar::<_, String>("SELECT body FROM models ORDER BY model COLLATE \"C\", endpoint COLLATE \"C\"");
    let bodies = bodies.fetch_all(sql).await?;
    Ok(bodies.iter().map(|body| from_json(body, "model")).collect::<Result<_, _>>()?)
}

pub(super) async fn put_pause(
    sql: &mut PgConnection,
    before: Option<&Pause>,
    after: Option<&Pause>,
) -> Result<bool, Fault> {
    let stored = sqlx::query_scalar::<_, Option<String>>("SELECT pause FROM agreement FOR UPDATE");
    if read_pause(stored.fetch_one(&mut *sql).await?)?.as_ref() != before {
        return Ok(false);
    }
    let after = after.map(|pause| to_json(pause, PAUSE)).transpose()?;
    sqlx::query("UPDATE agreement SET pause = $1").bind(after).execute(&mut *sql).await?;
    agree_anew(sql).await?;
    Ok(true)
}

pub(super) async fn pause(sql: &mut PgConnection) -> Result<Option<Pause>, Fault> {
    let stored = sqlx::query_scalar::<_, Option<String>>("SELECT pause FROM agreement").fetch_one(sql).await?;
    Ok(read_pause(stored)?)
}

pub(super) fn read_pause(stored: Option<String>) -> Result<Option<Pause>, StoreError> {
    stored.map(|json| from_json(&json, PAUSE)).transpose()
}

/// The newest cursor of the change log, and the epoch of the agreement.
pub(super) async fn newest(sql: &mut PgConnection) -> Result<(u64, u64), Fault> {
    let newest = sqlx::query("SELECT change, (SELECT epoch FROM agreement) FROM heads").fetch_one(sql).await?;
    Ok((newest.try_get::<i64, _>(0)?.cast_unsigned(), newest.try_get::<i64, _>(1)?.cast_unsigned()))
}

pub(super) async fn secret(sql: &mut PgConnection, name: &'static str, fresh: [u8; 32]) -> Result<[u8; 32], Fault> {
    let keep = sqlx::query("INSERT INTO secrets (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING");
    keep.bind(name).bind(fresh.as_slice()).execute(&mut *sql).await?;
    let kept = sqlx::query_scalar::<_, Vec<u8>>("SELECT value FROM secrets WHERE name = $1").bind(name);
    let kept = kept.fetch_one(sql).await?;
    Ok(kept.try_into().map_err(|_| corrupt(name, "it is not 32 bytes long"))?)
}
