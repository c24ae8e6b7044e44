/* One line per event on stderr: level and text, key=value pairs in the text. Where stderr is the
 * journal, which has the time, the level is its priority prefix ("<4>..."). Elsewhere the line
 * begins with the time and the level is a word ("2026-11-22T08:00:00.123Z warn: ..."). As JSON a
 * line is an object with the pairs as fields (log_json.h), behind the journal's prefix. Only
 * daemon/ logs.
 *
 * Each place in the code may say 20 lines in 5 seconds; what exceeds that is counted, and the count
 * is said ("op=connect suppressed=480 ...") when the period is over, with the next line of any
 * place or by log_flush(). What a %s stands for is one value, quoted and escaped where it has to be
 * (log_text.h): no peer can add a pair, a line or an escape sequence. Warnings and errors are also
 * kept, the last 16, for /status. Any thread.
 *
 * A warning or error says why, and do="...": what somebody should do
 * (tests/unit/daemon/base/test_log_lines.sh). */
#ifndef SHD_LOG_H
#define SHD_LOG_H

#include <stdbool.h>
#include <stdint.h>

enum log_level { LOG_LEVEL_ERROR = 3, LOG_LEVEL_WARN = 4, LOG_LEVEL_INFO = 6, LOG_LEVEL_DEBUG = 7 };

/* Lines above level are dropped. Default: INFO. */
void log_set_level(enum log_level level);

/* "text" or "json"; false when format is neither. Default: text. */
bool log_set_format(const char *format);

/* Whose lines they are, as JSON has it; borrowed for good. */
void log_set_device(const char *device);

/* "error", "warn", "info", "debug"; 0 when name is none of them. */
enum log_level log_level_parse(const char *name);
const char *log_level_name(enum log_level level);

struct log_site { /* one per place, static, zeroed at first */
    uint64_t since_ns;
    uint32_t said, suppressed;
    struct log_site *next; /* among those that hold lines back */
    enum log_level level;
    char op[32]; /* the first word of what is held back */
};

void log_at(struct log_site *site, enum log_level level, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Say how many lines were held back where the 5 s are over; all: everywhere, before the end. */
void log_flush(bool all);

#define log_line(level, ...)                          \
    do {                                              \
        static struct log_site log_site_here;         \
        log_at(&log_site_here, (level), __VA_ARGS__); \
    } while (0)
#define log_error(...) log_line(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...)  log_line(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_LEVEL_DEBUG, __VA_ARGS__)

/* -- For /status --------------------------------------------------------------------------------
 */

#define LOG_ENTRIES    16u
#define LOG_TEXT_BYTES 512u

struct log_entry {
    double time_s; /* since 1970 */
    enum log_level level;
    char text[LOG_TEXT_BYTES];
};

/* The last warnings and errors, oldest first; how many. */
uint32_t log_recent(struct log_entry ret_entries[LOG_ENTRIES]);

/* Lines held back since the start. */
uint64_t log_suppressed(void);

#endif
