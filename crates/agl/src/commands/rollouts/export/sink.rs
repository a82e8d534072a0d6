//! Rows as lines of JSON, or as parquet: without arrow, by the crate that reads tasks.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};

use anyhow::Context;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, FloatType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::{Map, Value};

use super::rows::{Cell, Column, Kind};

/// A row group is written once it has so many rows …
const GROUP_ROWS: usize = 8192;
/// … or about so many bytes.
const GROUP_BYTES: usize = 32 << 20;

/// Takes rows.
pub enum Sink {
    Jsonl { out: Box<dyn Write + Send>, columns: Vec<Column>, reader_is_gone: bool },
    Parquet(Box<Table>),
}

impl Sink {
    /// Lines on standard output.
    pub fn stdout(columns: Vec<Column>) -> Self {
        Self::lines(Box::new(BufWriter::new(std::io::stdout())), columns)
    }

    /// Lines in a file.
    pub fn jsonl(file: File, columns: Vec<Column>) -> Self {
        Self::lines(Box::new(BufWriter::with_capacity(1 << 18, file)), columns)
    }

    fn lines(out: Box<dyn Write + Send>, columns: Vec<Column>) -> Self {
        Self::Jsonl { out, columns, reader_is_gone: false }
    }

    /// A parquet file.
    pub fn parquet(file: File, columns: Vec<Column>) -> anyhow::Result<Self> {
        Ok(Self::Parquet(Box::new(Table::begin(file, &columns)?)))
    }

    /// Writes rows and says how many.
    pub fn write_all(&mut self, rows: Vec<Vec<Cell>>) -> anyhow::Result<u64> {
        let count = rows.len() as u64;
        match self {
            Self::Parquet(table) => rows.into_iter().try_for_each(|row| table.add(row))?,
            Self::Jsonl { out, columns, reader_is_gone } => {
                for row in rows {
                    let line = Value::Object(object(columns, row)).to_string() + "\n";
                    let written = out.write_all(line.as_bytes());
                    *reader_is_gone |= is_broken_pipe(&written);
                    if *reader_is_gone {
                        return Ok(0);
                    }
                    written.context("cannot write the rows")?;
                }
            }
        }
        Ok(count)
    }

    /// True where standard output leads to nobody any more (`agl … | head`).
    pub fn reader_is_gone(&self) -> bool {
        matches!(self, Self::Jsonl { reader_is_gone: true, .. })
    }

    /// Writes what is left.
    pub fn finish(self) -> anyhow::Result<()> {
        match self {
            Self::Parquet(table) => table.finish(),
            Self::Jsonl { reader_is_gone: true, .. } => Ok(()),
            Self::Jsonl { mut out, .. } => {
                let flushed = out.flush();
                if is_broken_pipe(&flushed) { Ok(()) } else { flushed.context("cannot write the rows") }
            }
        }
    }
}

fn is_broken_pipe(written: &std::io::Result<()>) -> bool {
    written.as_ref().is_err_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

fn object(columns: &[Column], row: Vec<Cell>) -> Map<String, Value> {
    columns.iter().zip(row).map(|(column, cell)| (column.name.to_owned(), json(cell))).collect()
}

fn json(cell: Cell) -> Value {
    match cell {
        Cell::Missing => Value::Null,
        Cell::Text(text) => text.into(),
        Cell::Json(value) => value,
        Cell::Integer(number) => number.into(),
        Cell::Number(number) => number.into(),
        Cell::Flag(flag) => flag.into(),
        Cell::Integers(numbers) => numbers.into(),
        Cell::Numbers(numbers) => numbers.into(),
    }
}

/// A parquet file under way.
pub struct Table {
    writer: SerializedFileWriter<File>,
    group: Vec<Buffer>,
    rows: usize,
    bytes: usize,
}

/// A column of the row group that is collected.
struct Buffer {
    column: Column,
    values: Values,
    /// Per value, or per missing value or empty list: how much of it is there.
    definition: Vec<i16>,
    /// The same: 0 begins a row, 1 goes on with its list.
    repetition: Vec<i16>,
}

enum Values {
    Texts(Vec<ByteArray>),
    Integers(Vec<i64>),
    Numbers(Vec<f64>),
    Singles(Vec<f32>),
    Flags(Vec<bool>),
}

impl Table {
    fn begin(file: File, columns: &[Column]) -> anyhow::Result<Self> {
        let schema = parse_message_type(&schema(columns)).context("the file's schema")?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::try_new(3)?))
            .set_created_by(format!("agl {}", env!("CARGO_PKG_VERSION")));
        let writer = SerializedFileWriter::new(file, schema.into(), properties.build().into())
            .context("cannot begin the parquet file")?;
        let group = columns.iter().map(|column| Buffer::new(*column)).collect();
        Ok(Self { writer, group, rows: 0, bytes: 0 })
    }

    fn add(&mut self, row: Vec<Cell>) -> anyhow::Result<()> {
        for (buffer, cell) in self.group.iter_mut().zip(row) {
            self.bytes += buffer.add(cell)?;
        }
        self.rows += 1;
        if self.rows >= GROUP_ROWS || self.bytes >= GROUP_BYTES { self.write_group() } else { Ok(()) }
    }

    fn write_group(&mut self) -> anyhow::Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        for buffer in &mut self.group {
            let mut column = group.next_column()?.with_context(|| format!("no column {}", buffer.column.name))?;
            buffer.write(&mut column).with_context(|| format!("cannot write column {}", buffer.column.name))?;
            column.close()?;
        }
        group.close()?;
        (self.rows, self.bytes) = (0, 0);
        Ok(())
    }

    fn finish(mut self) -> anyhow::Result<()> {
        self.write_group()?;
        self.writer.close().context("cannot finish the parquet file")?;
        Ok(())
    }
}

impl Buffer {
    fn new(column: Column) -> Self {
        let values = match column.kind {
            Kind::Text | Kind::Json => Values::Texts(Vec::new()),
            Kind::Integer | Kind::Integers => Values::Integers(Vec::new()),
            Kind::Number => Values::Numbers(Vec::new()),
            Kind::Numbers => Values::Singles(Vec::new()),
            Kind::Flag => Values::Flags(Vec::new()),
        };
        Self { column, values, definition: Vec::new(), repetition: Vec::new() }
    }

    /// Adds a value and says about how many bytes it takes.
    fn add(&mut self, cell: Cell) -> anyhow::Result<usize> {
        let mut single = || {
            self.definition.push(1);
            self.repetition.push(0);
        };
        match (cell, &mut self.values) {
            (Cell::Missing, _) => {
                self.definition.push(0);
                self.repetition.push(0);
                Ok(1)
            }
            (Cell::Text(text), Values::Texts(values)) => {
                single();
                values.push(ByteArray::from(text.into_bytes()));
                Ok(values.last().map_or(0, ByteArray::len))
            }
            (Cell::Json(value), Values::Texts(values)) => {
                single();
                values.push(ByteArray::from(value.to_string().into_bytes()));
                Ok(values.last().map_or(0, ByteArray::len))
            }
            (Cell::Integer(number), Values::Integers(values)) => {
                single();
                values.push(number);
                Ok(8)
            }
            (Cell::Number(number), Values::Numbers(values)) => {
                single();
                values.push(number);
                Ok(8)
            }
            (Cell::Flag(flag), Values::Flags(values)) => {
                single();
                values.push(flag);
                Ok(1)
            }
            (Cell::Integers(numbers), Values::Integers(values)) => {
                values.extend_from_slice(&numbers);
                Ok(self.list(numbers.len()))
            }
            (Cell::Numbers(numbers), Values::Singles(values)) => {
                values.extend_from_slice(&numbers);
                Ok(self.list(numbers.len()))
            }
            (cell, _) => anyhow::bail!("column {} does not hold {cell:?}", self.column.name),
        }
    }

    /// The levels of a list of that length.
    fn list(&mut self, length: usize) -> usize {
        if length == 0 {
            self.definition.push(1);
            self.repetition.push(0);
        }
        self.definition.extend(std::iter::repeat_n(2, length));
        self.repetition.extend((0..length).map(|index| i16::from(index > 0)));
        8 * length + 1
    }

    /// Writes what was added, and forgets it.
    fn write(&mut self, column: &mut SerializedColumnWriter<'_>) -> parquet::errors::Result<()> {
        let is_list = matches!(self.column.kind, Kind::Integers | Kind::Numbers);
        let (definition, repetition) =
            (Some(self.definition.as_slice()), is_list.then_some(self.repetition.as_slice()));
        match &mut self.values {
            Values::Texts(values) => {
                column.typed::<ByteArrayType>().write_batch(values, definition, repetition)?;
                values.clear();
            }
            Values::Integers(values) => {
                column.typed::<Int64Type>().write_batch(values, definition, repetition)?;
                values.clear();
            }
            Values::Numbers(values) => {
                column.typed::<DoubleType>().write_batch(values, definition, repetition)?;
                values.clear();
            }
            Values::Singles(values) => {
                column.typed::<FloatType>().write_batch(values, definition, repetition)?;
                values.clear();
            }
            Values::Flags(values) => {
                column.typed::<BoolType>().write_batch(values, definition, repetition)?;
                values.clear();
            }
        }
        self.definition.clear();
        self.repetition.clear();
        Ok(())
    }
}

fn schema(columns: &[Column]) -> String {
    let list = |kind: &str, name: &str| {
        format!("OPTIONAL GROUP {name} (LIST) {{ REPEATED GROUP list {{ REQUIRED {kind} element; }} }}")
    };
    let fields = columns.iter().map(|Column { name, kind }| match kind {
        Kind::Text | Kind::Json => format!("OPTIONAL BYTE_ARRAY {name} (UTF8);"),
        Kind::Integer => format!("OPTIONAL INT64 {name};"),
        Kind::Number => format!("OPTIONAL DOUBLE {name};"),
        Kind::Flag => format!("OPTIONAL BOOLEAN {name};"),
        Kind::Integers => list("INT64", name),
        Kind::Numbers => list("FLOAT", name),
    });
    format!("message rows {{ {} }}", fields.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use parquet::file::reader::{FileReader, SerializedFileReader};

    use super::super::rows::What;
    use super::super::rows::tests::example;
    use super::*;

    fn read_parquet(file: File) -> Vec<Value> {
        let reader = SerializedFileReader::new(file).unwrap();
        reader.get_row_iter(None).unwrap().map(|row| row.unwrap().to_json_value()).collect()
    }

    /// JSON columns are text in parquet.
    fn read_texts(columns: &[Column], mut row: Value) -> Value {
        for column in columns.iter().filter(|column| column.kind == Kind::Json) {
            let text = row[column.name].as_str().unwrap();
            row[column.name] = serde_json::from_str(text).unwrap();
        }
        row
    }

    #[test]
    fn both_formats_say_the_same_and_read_back() {
        for what in What::value_variants() {
            let columns = what.columns();
            let (lines, table) = (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
            for mut sink in [
                Sink::jsonl(lines.reopen().unwrap(), columns.clone()),
                Sink::parquet(table.reopen().unwrap(), columns.clone()).unwrap(),
            ] {
                sink.write_all(what.rows(&example())).unwrap();
                sink.write_all(what.rows(&example())).unwrap();
                sink.finish().unwrap();
            }
            let text = std::fs::read_to_string(lines.path()).unwrap();
            let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let table: Vec<Value> =
                read_parquet(table.reopen().unwrap()).into_iter().map(|row| read_texts(&columns, row)).collect();
            assert_eq!(lines.len(), 2 * what.rows(&example()).len());
            assert_eq!(lines, table, "{what:?}");
        }
    }

    #[test]
    fn a_table_of_more_rows_than_a_group_holds_is_whole_and_so_is_an_empty_one() {
        let columns = What::Sequences.columns();
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut sink = Sink::parquet(file.reopen().unwrap(), columns.clone()).unwrap();
        for _ in 0..=GROUP_ROWS {
            sink.write_all(What::Sequences.rows(&example())).unwrap();
        }
        sink.finish().unwrap();
        assert_eq!(SerializedFileReader::new(file.reopen().unwrap()).unwrap().num_row_groups(), 2);
        let rows = read_parquet(file.reopen().unwrap());
        assert_eq!(rows.len(), GROUP_ROWS + 1);
        assert_eq!(rows[GROUP_ROWS], rows[0]);

        let empty = tempfile::NamedTempFile::new().unwrap();
        Sink::parquet(empty.reopen().unwrap(), columns).unwrap().finish().unwrap();
        assert!(read_parquet(empty.reopen().unwrap()).is_empty());
    }

    #[test]
    fn a_list_may_be_empty_or_missing() {
        let columns = vec![Column { name: "ids", kind: Kind::Integers }];
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut sink = Sink::parquet(file.reopen().unwrap(), columns).unwrap();
        let rows = [Cell::Integers(vec![]), Cell::Missing, Cell::Integers(vec![5, 6])];
        sink.write_all(rows.into_iter().map(|cell| vec![cell]).collect()).unwrap();
        sink.finish().unwrap();
        let ids: Vec<Value> = read_parquet(file.reopen().unwrap()).into_iter().map(|row| row["ids"].clone()).collect();
        assert_eq!(ids, [serde_json::json!([]), Value::Null, serde_json::json!([5, 6])]);
    }
}
