//! Tasks: one row of a jsonl or parquet file is one rollout's `input`.

use std::path::{Path, PathBuf};

use parquet::file::reader::{FileReader, SerializedFileReader};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use crate::TrainerError;

/// The tasks of some files, in the order of the files and their rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Tasks {
    rows: Vec<Value>,
}

impl Tasks {
    /// Reads all files.
    ///
    /// # Errors
    /// [`TrainerError::Data`] naming the file, and the line of a jsonl file, that cannot be used.
    pub fn read(files: &[PathBuf]) -> Result<Self, TrainerError> {
        let mut rows = Vec::new();
        for file in files {
            let before = rows.len();
            match file.extension().and_then(|extension| extension.to_str()) {
                Some("jsonl" | "json") => read_jsonl(file, &mut rows)?,
                Some("parquet") => read_parquet(file, &mut rows)?,
                _ => return Err(wrong(file, "is neither .jsonl nor .parquet")),
            }
            if rows.len() == before {
                return Err(wrong(file, "holds no rows"));
            }
        }
        Ok(Self { rows })
    }

    /// Number of tasks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The task at `index`, and its id: the row's own `data_id` or `instance_id`, else its position.
    #[must_use]
    pub fn task(&self, index: usize) -> Task {
        let input = self.rows[index].clone();
        let id = ["data_id", "instance_id"].iter().find_map(|key| match input.get(key)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        });
        Task { data_id: id.unwrap_or_else(|| index.to_string()), input }
    }

    /// The tasks of training step `step` (from 1): `count` of them, each epoch in an order of its own.
    #[must_use]
    pub fn batch(&self, step: u64, count: usize, shuffle: bool, seed: u64) -> Vec<Task> {
        let total = self.rows.len() as u64;
        let first = (step - 1) * count as u64;
        let mut order: (u64, Vec<usize>) = (u64::MAX, Vec::new());
        (first..first + count as u64)
            .map(|position| {
                let epoch = position / total;
                if order.0 != epoch {
                    order = (epoch, self.order(epoch, shuffle, seed));
                }
                self.task(order.1[usize::try_from(position % total).unwrap_or(0)])
            })
            .collect()
    }

    fn order(&self, epoch: u64, shuffle: bool, seed: u64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.rows.len()).collect();
        if shuffle {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(epoch);
            order.shuffle(&mut rng);
        }
        order
    }
}

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// Names the task in metadata and seeds.
    pub data_id: String,
    /// The row, as it is.
    pub input: Value,
}

fn wrong(file: &Path, what: impl Into<String>) -> TrainerError {
    TrainerError::Data { path: file.to_owned(), what: what.into() }
}

fn read_jsonl(file: &Path, rows: &mut Vec<Value>) -> Result<(), TrainerError> {
    let text = std::fs::read_to_string(file).map_err(|error| wrong(file, format!("cannot be read: {error}")))?;
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let row = serde_json::from_str(line)
            .map_err(|error| wrong(file, format!("line {} is not JSON: {error}", number + 1)))?;
        rows.push(row);
    }
    Ok(())
}

fn read_parquet(file: &Path, rows: &mut Vec<Value>) -> Result<(), TrainerError> {
    let opened = std::fs::File::open(file).map_err(|error| wrong(file, format!("cannot be read: {error}")))?;
    let broken = |error: parquet::errors::ParquetError| wrong(file, format!("is not readable as parquet: {error}"));
    let reader = SerializedFileReader::new(opened).map_err(broken)?;
    for row in reader.get_row_iter(None).map_err(broken)? {
        rows.push(row.map_err(broken)?.to_json_value());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks(count: usize) -> Tasks {
        Tasks { rows: (0..count).map(|index| serde_json::json!({ "data_id": format!("t{index}") })).collect() }
    }

    #[test]
    fn an_epoch_takes_every_task_once_and_the_next_in_another_order() {
        let tasks = tasks(12);
        let ids = |step| tasks.batch(step, 4, true, 7).into_iter().map(|task| task.data_id).collect::<Vec<_>>();
        let first: Vec<_> = (1..=3).flat_map(ids).collect();
        let second: Vec<_> = (4..=6).flat_map(ids).collect();
        assert_ne!(first, second);
        for mut epoch in [first, second] {
            epoch.sort();
            epoch.dedup();
            assert_eq!(epoch.len(), 12);
        }
    }

    #[test]
    fn a_step_s_tasks_do_not_depend_on_the_steps_before() {
        assert_eq!(tasks(10).batch(3, 4, true, 1), tasks(10).batch(3, 4, true, 1));
    }

    #[test]
    fn a_broken_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tasks.jsonl");
        std::fs::write(&file, "{\"question\": 1}\n\n{oops\n").unwrap();
        let message = Tasks::read(std::slice::from_ref(&file)).unwrap_err().to_string();
        assert!(message.contains("tasks.jsonl: line 3 is not JSON"), "{message}");
    }

    #[test]
    fn a_missing_file_and_an_unknown_kind_are_named() {
        let missing = Tasks::read(&["nowhere.jsonl".into()]).unwrap_err().to_string();
        assert!(missing.contains("nowhere.jsonl: cannot be read"), "{missing}");
        let kind = Tasks::read(&["tasks.csv".into()]).unwrap_err().to_string();
        assert!(kind.contains("neither .jsonl nor .parquet"), "{kind}");
    }

    #[test]
    fn parquet_rows_become_json_objects() {
        use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
        use parquet::file::properties::WriterProperties;
        use parquet::file::writer::SerializedFileWriter;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tasks.parquet");
        let schema = parquet::schema::parser::parse_message_type(
            "message tasks { REQUIRED BYTE_ARRAY question (UTF8); REQUIRED INT64 answer; }",
        )
        .unwrap();
        let out = std::fs::File::create(&file).unwrap();
        let mut writer =
            SerializedFileWriter::new(out, schema.into(), WriterProperties::builder().build().into()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column
            .typed::<ByteArrayType>()
            .write_batch(&[ByteArray::from("1 + 1?"), ByteArray::from("2 + 3?")], None, None)
            .unwrap();
        column.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&[2, 5], None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        let tasks = Tasks::read(&[file]).unwrap();
        assert_eq!(tasks.task(1).input, serde_json::json!({"question": "2 + 3?", "answer": 5}));
    }
}
