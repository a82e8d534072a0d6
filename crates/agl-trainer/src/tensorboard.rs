//! TensorBoard event files, the few fields of the format that scalars need: a sequence of records
//! `length (u64) · masked crc32c of it · Event (protobuf) · masked crc32c of it`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::TrainerError;

/// Appends to one event file.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// Starts a new event file in `folder`; TensorBoard reads all of a folder together.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn create(folder: &Path) -> Result<Self, TrainerError> {
        std::fs::create_dir_all(folder).map_err(TrainerError::io(folder))?;
        let name = format!("events.out.tfevents.{:.0}.{}.agl", seconds(), std::process::id());
        let path = folder.join(name);
        let file = File::create(&path).map_err(TrainerError::io(&path))?;
        let mut writer = Self { path, file };
        let mut event = Message::default();
        event.double(1, seconds());
        event.bytes(3, b"brain.Event:2");
        writer.record(&event)?;
        Ok(writer)
    }

    /// Appends the scalars of a step.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn scalars(&mut self, step: u64, scalars: &BTreeMap<String, f64>) -> Result<(), TrainerError> {
        let mut summary = Message::default();
        for (name, value) in scalars {
            let mut entry = Message::default();
            entry.bytes(1, name.as_bytes());
            entry.float(2, *value as f32);
            summary.bytes(1, &entry.0);
        }
        let mut event = Message::default();
        event.double(1, seconds());
        event.varint(2, step);
        event.bytes(5, &summary.0);
        self.record(&event)
    }

    fn record(&mut self, event: &Message) -> Result<(), TrainerError> {
        let length = (event.0.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(&event.0);
        record.extend(masked_crc(&event.0).to_le_bytes());
        self.file.write_all(&record).map_err(TrainerError::io(&self.path))
    }
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// TFRecord masks its checksums so that a checksum of data that holds checksums stays sound.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A protobuf message being written.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(&mut self, field: u64, wire: u64) {
        self.raw(field << 3 | wire);
    }

    fn raw(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value as u8 & 0x7f) | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.raw(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, 2);
        self.raw(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_framed_with_masked_checksums() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(folder.path()).unwrap();
        writer.scalars(300, &BTreeMap::from([("reward".to_owned(), 0.5)])).unwrap();
        let bytes = std::fs::read(&writer.path).unwrap();
        let mut rest = &bytes[..];
        let mut events = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(rest[8..12], masked_crc(&rest[..8]).to_le_bytes());
            let event = &rest[12..12 + length];
            assert_eq!(rest[12 + length..16 + length], masked_crc(event).to_le_bytes());
            events.push(event.to_vec());
            rest = &rest[16 + length..];
        }
        assert_eq!(events.len(), 2);
        assert!(events[0].ends_with(b"brain.Event:2"));
        // After the wall time: step 300 as a varint, then a summary with one named float.
        let expected =
            [&[0x10, 0xac, 0x02, 0x2a, 15, 0x0a, 13, 0x0a, 6][..], b"reward", &[0x15], &0.5_f32.to_le_bytes()].concat();
        assert_eq!(events[1][9..], expected);
    }

    #[test]
    fn the_checksum_is_castagnoli_s() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }
}
