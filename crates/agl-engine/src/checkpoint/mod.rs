//! Model directories in the layout of Hugging Face, and the optimiser state beside them.
//!
//! * [`directory`]: reading and writing a whole directory.
//! * [`tensors`]: `safetensors` files to tensors and back.
//! * [`atomic`]: a directory appears whole or not at all.

mod atomic;
pub(crate) mod directory;
pub(crate) mod tensors;
