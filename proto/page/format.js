/* -- Numbers for people; what is not there is an en dash -------------------------------------- */

const NONE = "\u2013";
const NARROW = "\u202f";
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

function fixed(x, digits) {
  const parts = x.toFixed(digits).split(".");
  parts[0] = parts[0].replace(/\B(?=(\d{3})+$)/g, NARROW);
  return parts.join(".");
}

/* Three digits that count: 0.42, 4.2, 42, 420, 4 200. */
function plain(x) {
  if (!isNumber(x)) return NONE;
  const size = Math.abs(x);
  return fixed(x, size >= 100 || size === 0 ? 0 : size >= 1 ? 1 : size >= 0.095 ? 2 : 3);
}

const count = (x) => (isNumber(x) ? fixed(x, 0) : NONE);

function scaled(x, base, units) {
  let unit = 0;
  for (; Math.abs(x) >= base && unit + 1 < units.length; unit++) x /= base;
  const digits = unit === 0 || Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? 1 : 2;
  return fixed(x, digits) + (units[unit] ? NARROW + units[unit] : "");
}

const bytes = (x) => (isNumber(x) ? scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]) : NONE);
const short = (x) => (isNumber(x) ? scaled(x, 1000, ["", "k", "M", "G", "T"]) : NONE);
const perSecond = (text) => (text === NONE ? NONE : text + NARROW + "/s");

function milliseconds(x) {
  if (!isNumber(x)) return NONE;
  return x >= 1000 ? duration(x / 1000) : plain(x) + NARROW + "ms";
}

function duration(s) {
  if (!isNumber(s)) return NONE;
  if (s < 0.9995) return fixed(Math.max(0, s) * 1000, 0) + NARROW + "ms";
  if (s < 59.95) return fixed(s, 1) + NARROW + "s";
  const whole = Math.round(s);
  if (whole < 3600) return two(whole, 60, "min", "s");
  if (whole < 86400) return two(Math.floor(whole / 60), 60, "h", "min");
  return two(Math.floor(whole / 3600), 24, "d", "h");
}

const two = (x, base, big, small) =>
  Math.floor(x / base) + NARROW + big + " " + (x % base) + NARROW + small;

const capital = (word) => word[0].toUpperCase() + word.slice(1);
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
const plural = (n, one, many) => count(n) + " " + (n === 1 ? one : many || one + "s");
const text = (x) => (x === undefined || x === null || x === "" ? NONE : String(x));
