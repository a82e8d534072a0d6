//! The gateways on this database.

use std::time::Duration;

use sqlx::{PgConnection, Row};

use super::settings::read_pause;
use super::{Fault, signed};
use crate::peers::{Agreement, Peer, Presence};

/// See [`crate::Peers::lease`]. Short enough that a pause does not wait long for a gateway that was killed, and long enough that
/// a database that stumbles costs no call at a server. Measured by the server's clock.
pub(super) const LEASE: Duration = Duration::from_secs(10);

/// A number that no gateway had before.
pub(super) async fn number(sql: &mut PgConnection) -> Result<i64, Fault> {
    Ok(sqlx::query_scalar("SELECT nextval('gateway_numbers')").fetch_one(sql).await?)
}

pub(super) async fn check_in(sql: &mut PgConnection, gateway: i64, presence: Presence) -> Result<Agreement, Fault> {
    // Holding the agreement, so that whoever changes it either comes before this or finds this gateway alive.
    let said = sqlx::query(
        "WITH agreed AS (SELECT epoch, pause FROM agreement FOR SHARE),
              said AS (
                  INSERT INTO gateways (number, started_at, seen_at, inflight, held, epoch)
                  SELECT $1, clock_timestamp(), clock_timestamp(), $2, $3, $4 FROM agreed
                  ON CONFLICT (number) DO UPDATE SET seen_at = clock_timestamp(), inflight = excluded.inflight,
                      held = excluded.held, epoch = excluded.epoch
                  RETURNING started_at)
         SELECT agreed.epoch, agreed.pause, extract(epoch FROM greatest(said.started_at, (
             SELECT max(greatest(g.started_at, g.left_at,
                                 CASE WHEN g.seen_at < clock_timestamp() - make_interval(secs => $5) THEN g.seen_at END))
             FROM gateways g WHERE g.number <> $1)))::double precision
         FROM agreed, said",
    );
    let said = said.bind(gateway).bind(signed(presence.inflight)).bind(signed(presence.held));
    let said = said.bind(signed(presence.epoch)).bind(LEASE.as_secs_f64()).fetch_one(sql).await?;
    Ok(Agreement {
        epoch: said.try_get::<i64, _>(0)?.cast_unsigned(),
        pause: read_pause(said.try_get(1)?)?,
        last_upheaval: said.try_get(2)?,
    })
}

pub(super) async fn roll_call(sql: &mut PgConnection, gateway: i64) -> Result<Vec<Peer>, Fault> {
    let rows = sqlx::query(
        "SELECT number, inflight, held, epoch FROM gateways
         WHERE left_at IS NULL AND seen_at > clock_timestamp() - make_interval(secs => $1) ORDER BY number",
    );
    let rows = rows.bind(LEASE.as_secs_f64()).fetch_all(sql).await?;
    let read = |row: &sqlx::postgres::PgRow| {
        let number = |column: usize| Ok::<_, Fault>(row.try_get::<i64, _>(column)?.cast_unsigned());
        let presence = Presence { inflight: number(1)?, held: number(2)?, epoch: number(3)? };
        let number = number(0)?;
        Ok(Peer { number, is_me: number == gateway.cast_unsigned(), presence })
    };
    rows.iter().map(read).collect()
}

/// Says that this gateway ends: nobody waits for it any more. Gateways that ended long ago are forgotten.
pub(super) async fn leave(sql: &mut PgConnection, gateway: i64) -> Result<(), Fault> {
    let leave =
        sqlx::query("UPDATE gateways SET left_at = clock_timestamp(), inflight = 0, held = 0 WHERE number = $1");
    leave.bind(gateway).execute(&mut *sql).await?;
    sqlx::query("DELETE FROM gateways WHERE seen_at < clock_timestamp() - interval '7 days'").execute(sql).await?;
    Ok(())
}
