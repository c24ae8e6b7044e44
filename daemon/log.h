/* One line per event on stderr: "<level> text", key=value pairs in the text. Under systemd the
 * level is the journal's priority prefix ("<4>..."), elsewhere a word. Only daemon/ logs. */
#ifndef SHD_LOG_H
#define SHD_LOG_H

enum log_level { LOG_LEVEL_ERROR = 3, LOG_LEVEL_WARN = 4, LOG_LEVEL_INFO = 6, LOG_LEVEL_DEBUG = 7 };

/* Lines above level are dropped. Default: INFO. */
void log_set_level(enum log_level level);

/* "error", "warn", "info", "debug"; 0 when name is none of them. */
enum log_level log_level_parse(const char *name);

void log_line(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...)  log_line(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
