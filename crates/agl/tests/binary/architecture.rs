//! ARCHITECTURE.md is a map, so every place it names must exist, and every arrow of its picture must be followed by name.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn page() -> String {
    fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap()
}

/// Everything between backticks outside fenced blocks.
fn code_spans(page: &str) -> Vec<String> {
    let outside: String = page.split("```").step_by(2).collect();
    outside.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// True where a file defines something of that name.
fn defines(text: &str, symbol: &str) -> bool {
    let kinds = ["fn", "struct", "enum", "trait", "const", "static", "type", "mod", "macro_rules!"];
    kinds.iter().any(|kind| {
        text.match_indices(&format!("{kind} {symbol}")).any(|(at, found)| {
            let after = text[at + found.len()..].chars().next();
            !after.is_some_and(|next| next.is_alphanumeric() || next == '_')
        })
    })
}

#[test]
fn every_path_and_symbol_that_the_map_names_exists() {
    let mut resolved = 0;
    for span in code_spans(&page()).into_iter().filter(|span| span.contains('/') && !span.contains(' ')) {
        let (path, symbol) = span.split_once("::").map_or((span.as_str(), None), |(path, symbol)| (path, Some(symbol)));
        let place = root().join(path);
        assert!(place.exists(), "ARCHITECTURE.md names `{span}`, but {path} does not exist");
        if let Some(symbol) = symbol {
            let text = fs::read_to_string(&place).unwrap();
            assert!(defines(&text, symbol), "ARCHITECTURE.md names `{span}`, but {path} defines no {symbol}");
        }
        resolved += 1;
    }
    assert!(resolved > 30, "only {resolved} places were found: has the page changed its form?");
}

#[test]
fn every_arrow_of_the_picture_has_a_row_in_the_table_and_the_other_way_round() {
    let page = page();
    let picture = page.split("```text").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let rows: BTreeSet<&str> = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let arrows: BTreeSet<&str> = picture.split('[').skip(1).filter_map(|rest| rest.split(']').next()).collect();
    assert!(arrows.len() > 10, "the picture's arrows carry their names in brackets: {arrows:?}");
    assert_eq!(arrows, rows, "the picture's arrows and the table's rows");
}
