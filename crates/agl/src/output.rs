//! What the command line prints: results on standard output, the rest on standard error.

use std::io::Write;

use serde::Serialize;

/// One line on standard output. A reader that has gone away (`agl … | head`) is no error.
pub fn line(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// One line on standard error.
pub fn note(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// A value as JSON on standard output.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    line(serde_json::to_string_pretty(value)?);
    Ok(())
}

/// Rows under their headings, columns as wide as their widest entry.
pub fn table(headings: &[&str], rows: &[Vec<String>]) {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([headings[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let print = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        line(padded.join("  ").trim_end());
    };
    print(&mut headings.iter().copied());
    for row in rows {
        print(&mut row.iter().map(String::as_str));
    }
}

/// A text cut to `length` characters, on one line.
pub fn clipped(text: &str, length: usize) -> String {
    let flat: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if flat.chars().count() <= length {
        return flat;
    }
    flat.chars().take(length.saturating_sub(1)).chain(['…']).collect()
}
