//! An output stream kept on disk up to a limit: its head and its tail.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncReadExt};

/// Below this a log would hold nothing of use.
const SMALLEST_LIMIT: u64 = 4096;

/// A file that takes any amount and keeps the first half of its limit and the last quarter to half.
///
/// What goes beyond the head is written to two segment files by turns, so that nothing is held in memory and a crash
/// leaves the newest output on disk. [`LimitedLog::finish`] joins head, a line that says how much is missing, and tail.
pub struct LimitedLog {
    path: PathBuf,
    head: File,
    head_room: u64,
    segment_limit: u64,
    segment: Option<(File, u64)>,
    /// Bytes that went beyond the head.
    beyond: u64,
}

impl LimitedLog {
    /// Starts the file anew.
    ///
    /// # Errors
    /// What the file system says.
    pub fn create(path: &Path, limit: u64) -> io::Result<Self> {
        let limit = limit.max(SMALLEST_LIMIT);
        Ok(Self {
            path: path.to_owned(),
            head: File::create(path)?,
            head_room: limit / 2,
            segment_limit: limit / 4,
            segment: None,
            beyond: 0,
        })
    }

    fn segment_path(&self, name: &str) -> PathBuf {
        self.path.with_extension(format!("log.{name}"))
    }

    /// Takes output.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let room = usize::try_from(self.head_room).unwrap_or(usize::MAX).min(bytes.len());
        let (head, mut rest) = bytes.split_at(room);
        self.head.write_all(head)?;
        self.head_room -= room as u64;
        self.beyond += rest.len() as u64;
        // What two full segments of newer bytes would push out at once need not be written.
        let twice = usize::try_from(2 * self.segment_limit).unwrap_or(usize::MAX);
        rest = &rest[rest.len().saturating_sub(twice)..];
        while !rest.is_empty() {
            let (file, written) = match &mut self.segment {
                Some(segment) if segment.1 < self.segment_limit => segment,
                full => {
                    let current = self.path.with_extension("log.tail");
                    if full.is_some() {
                        std::fs::rename(&current, self.path.with_extension("log.tail.old"))?;
                    }
                    full.insert((File::create(current)?, 0))
                }
            };
            let room = usize::try_from(self.segment_limit - *written).unwrap_or(usize::MAX).min(rest.len());
            file.write_all(&rest[..room])?;
            *written += room as u64;
            rest = &rest[room..];
        }
        Ok(())
    }

    /// Joins what was kept.
    ///
    /// # Errors
    /// What the file system says.
    pub fn finish(mut self) -> io::Result<()> {
        let Some((_, newest)) = self.segment else { return Ok(()) };
        let old = self.segment_path("tail.old");
        let older = if old.exists() { self.segment_limit } else { 0 };
        let missing = self.beyond - newest - older;
        if missing > 0 {
            write!(self.head, "\n[agl: {missing} bytes left out here; log_limit_bytes decides]\n")?;
        }
        for segment in [old, self.segment_path("tail")] {
            if segment.exists() {
                io::copy(&mut File::open(&segment)?, &mut self.head)?;
                std::fs::remove_file(segment)?;
            }
        }
        Ok(())
    }
}

/// Copies a stream into a log until it ends. The stream is read to its end even where the disk is full: an agent must
/// not block on its own output.
pub async fn keep(mut stream: impl AsyncRead + Unpin, mut log: LimitedLog) -> io::Result<()> {
    let mut buffer = vec![0; 32 * 1024];
    let mut outcome = Ok(());
    loop {
        let read = match stream.read(&mut buffer).await {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) => {
                outcome = outcome.and(Err(error));
                break;
            }
        };
        if outcome.is_ok() {
            outcome = log.write(&buffer[..read]);
        }
    }
    outcome.and(log.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(limit: u64, pieces: &[&[u8]]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stdout.log");
        let mut log = LimitedLog::create(&path, limit).unwrap();
        for piece in pieces {
            log.write(piece).unwrap();
        }
        log.finish().unwrap();
        let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(files.len(), 1, "segments are gone");
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn output_within_the_limit_is_kept_whole_whatever_its_pieces() {
        let text: String = (0..1000).map(|n| format!("{n:03}\n")).collect();
        let pieces: Vec<&[u8]> = text.as_bytes().chunks(7).collect();
        assert_eq!(kept(4096, &pieces), text);
        assert_eq!(kept(4096, &[text.as_bytes()]), text);
    }

    #[test]
    fn output_beyond_the_limit_keeps_head_and_tail_and_says_how_much_is_missing() {
        let text: String = (0..100_000).map(|n| format!("{n:05}\n")).collect();
        let pieces: Vec<&[u8]> = text.as_bytes().chunks(1001).collect();
        let kept = kept(4096, &pieces);
        let (head, rest) = kept.split_once("\n[agl: ").unwrap();
        let (missing, tail) = rest.split_once(" bytes left out here; log_limit_bytes decides]\n").unwrap();
        assert_eq!(head, &text[..2048]);
        assert!(text.ends_with(tail) && tail.len() >= 1024 && tail.len() <= 2048, "{}", tail.len());
        assert_eq!(head.len() + missing.parse::<usize>().unwrap() + tail.len(), text.len());
    }
}
