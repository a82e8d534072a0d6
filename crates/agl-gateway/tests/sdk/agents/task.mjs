// As task.py.
export const QUESTION = "What is 6 times 7? Use the tool.";
export const SYSTEM = "You multiply.";
export const SCHEMA = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};

export const multiply = ({ a, b }) => String(a * b);

export function answer(text) {
  if (!text.includes("42")) throw new Error(`not the result: ${text}`);
  console.log("ANSWER:", text);
}
