/* See log.h. */
#include "daemon/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum log_level level_max = LOG_LEVEL_INFO;

void log_set_level(enum log_level level)
{
    level_max = level;
}

static const char *level_word(enum log_level level)
{
    switch (level) {
    case LOG_LEVEL_ERROR:
        return "error";
    case LOG_LEVEL_WARN:
        return "warn";
    case LOG_LEVEL_INFO:
        return "info";
    case LOG_LEVEL_DEBUG:
        return "debug";
    }
    return "?";
}

enum log_level log_level_parse(const char *name)
{
    static const enum log_level levels[] = { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO,
                                             LOG_LEVEL_DEBUG };
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++)
        if (strcmp(name, level_word(levels[i])) == 0)
            return levels[i];
    return (enum log_level)0;
}

void log_line(enum log_level level, const char *fmt, ...)
{
    if (level > level_max)
        return;
    char line[1024];
    size_t used;
    if (getenv("JOURNAL_STREAM") != NULL)
        used = (size_t)snprintf(line, sizeof line, "<%d>", (int)level);
    else
        used = (size_t)snprintf(line, sizeof line, "%s: ", level_word(level));
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line + used, sizeof line - used, fmt, ap);
    va_end(ap);
    fprintf(stderr, "%s\n", line); /* one write: lines of several processes do not mix */
}
