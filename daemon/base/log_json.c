/* See log_json.h. */
#include "daemon/base/log_json.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#define KEY_BYTES   40u
#define VALUE_BYTES 1024u
#define DIGITS_MAX  15u /* a double has them exactly */

/* Names come from peers, and may be no UTF-8. */
static json_t *string_of(const char *value)
{
    json_t *s = json_string(value);
    return s != NULL ? s : json_string("?");
}

static json_t *value_of(const char *value, bool quoted)
{
    const size_t bytes = strlen(value);
    if (!quoted && bytes > 0 && bytes <= DIGITS_MAX && strspn(value, "0123456789") == bytes)
        return json_integer(strtoll(value, NULL, 10));
    return string_of(value);
}

/* "key=" at *at goes to key, and *at behind it; false: something else is there. */
static bool take_key(const char **at, char key[KEY_BYTES])
{
    const size_t bytes = strspn(*at, "abcdefghijklmnopqrstuvwxyz0123456789_");
    if (bytes == 0 || bytes >= KEY_BYTES || (*at)[bytes] != '=')
        return false;
    memcpy(key, *at, bytes);
    key[bytes] = '\0';
    *at += bytes + 1;
    return true;
}

/* What log_text.h has escaped: of the '\' at *at, which moves to its end. What is no UTF-8 stays
 * escaped. */
static char unescape(const char **at)
{
    static const char from[] = "nrt\"\\", to[] = "\n\r\t\"\\";
    const char *c = *at, *known = c[1] != '\0' ? strchr(from, c[1]) : NULL;
    unsigned code = 0;
    if (known != NULL) {
        *at += 1;
        return to[known - from];
    }
    if (sscanf(c, "\\x%2x", &code) != 1 || code == 0 || code > 0x7f)
        return *c;
    *at += 3;
    return (char)code;
}

/* Up to a blank, or in quotes up to the one that a blank or the end follows. */
static bool take_value(const char **at, char value[VALUE_BYTES])
{
    const char *c = *at;
    const bool quoted = *c == '"';
    size_t used = 0;
    for (c += quoted; *c != '\0' && used + 1 < VALUE_BYTES; c++) {
        if (quoted ? *c == '"' && (c[1] == ' ' || c[1] == '\0') : *c == ' ')
            break;
        value[used++] = quoted && *c == '\\' ? unescape(&c) : *c;
    }
    value[used] = '\0';
    *at = c + (quoted && *c == '"');
    return quoted;
}

char *log_json(const char *time, const char *device, const char *level, const char *text)
{
    char key[KEY_BYTES], value[VALUE_BYTES];
    json_t *o = json_pack("{s:s, s:s, s:s}", "time", time, "device", device, "level", level);
    while (*text != '\0' && take_key(&text, key)) {
        const bool quoted = take_value(&text, value);
        json_object_set_new(o, key, value_of(value, quoted));
        text += strspn(text, " ");
    }
    if (*text != '\0')
        json_object_set_new(o, "text", string_of(text));
    char *line = json_dumps(o, JSON_COMPACT | JSON_ENSURE_ASCII);
    json_decref(o);
    return line;
}
