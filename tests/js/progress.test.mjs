// The bar of a long cell without a browser: node --test tests/js
import assert from "node:assert/strict";
import { test } from "node:test";

import { shownOf } from "../../gpumem_magic/widgets/progress.js";

test("shares become widths, and what is no share becomes none", () => {
  assert.deepEqual(shownOf({ words: "14 s", now: 0.25, most: 0.5 }), { words: "14 s", now: "25%", most: "50%" });
  assert.deepEqual(shownOf({ words: "x", now: 7, most: -1 }), { words: "x", now: "100%", most: "0%" });
  assert.deepEqual(shownOf({}), { words: "", now: "0%", most: "0%" });
  assert.deepEqual(shownOf(undefined), { words: "", now: "0%", most: "0%" });
});
