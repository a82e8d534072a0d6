//! The file's room. Pages that a deletion frees are used again by what is written next; where a quarter of the file is free, its
//! end is cut off step by step, so that a file that has become too large shrinks while the gateway goes on.
//!
//! A file made before `auto_vacuum` was set keeps its size and uses its free pages again; `PRAGMA auto_vacuum = 2; VACUUM` with
//! the gateway stopped makes it one that shrinks.

use super::Sql;
use crate::StoreError;

/// Fewer free pages than this are left for what is written next.
const SPARE_PAGES: i64 = 256;

/// The bytes of all pages that hold something.
pub(super) fn in_use(sql: &Sql<'_>) -> Result<u64, StoreError> {
    let bytes = sql.first(
        "SELECT (pages.page_count - free.freelist_count) * size.page_size
         FROM pragma_page_count() AS pages, pragma_freelist_count() AS free, pragma_page_size() AS size",
        [],
        |row| row.get::<_, i64>(0),
    )?;
    Ok(bytes.unwrap_or(0).max(0).cast_unsigned())
}

/// Cuts a little off the end of a file with much free room; to be called after a deletion. Little, because model calls wait in the
/// same queue.
pub(super) fn give_back(sql: &Sql<'_>) -> Result<(), StoreError> {
    let counts = sql.first(
        "SELECT pages.page_count, free.freelist_count FROM pragma_page_count() AS pages, pragma_freelist_count() AS free",
        [],
        |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)),
    )?;
    if counts.is_some_and(|(pages, free)| free > SPARE_PAGES && free > pages / 4) {
        // A row for each page.
        sql.all("PRAGMA incremental_vacuum(64)", [], |_| Ok(()))?;
    }
    Ok(())
}
