#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| agl_store::fuzz::stored(data));
