# failed.awk -v preset=NAME LOG: of ctest's log, each test that failed and the lines that say why: what
# a check, a sanitizer or Python has said, else its last ones; at most SHOWN_MAX of each test.
function ends_test(    i, from) {
    if (name == "")
        return
    print preset ": " name ": " how
    if (told == 0) # nothing known was said
        for (from = count > LAST_SHOWN ? count - LAST_SHOWN : 0; from < count; from++)
            why[told++] = all[from]
    for (i = 0; i < told && i < SHOWN_MAX; i++)
        print "    " substr(why[i], 1, COLUMNS_MAX)
    if (told > SHOWN_MAX)
        print "    and " told - SHOWN_MAX " more such lines"
    name = ""
}
BEGIN { SHOWN_MAX = 6; LAST_SHOWN = 4; COLUMNS_MAX = 400 }
/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: / || /^ +Start +[0-9]+: / || /^[0-9]+% tests passed/ {
    ends_test()
    if ($0 ~ /\*\*\*/ && $0 !~ /\*\*\*Skipped/ && $0 !~ /^ +Start/) {
        name = $0
        sub(/^.*Test +#[0-9]+: /, "", name)
        sub(/ .*/, "", name)
        how = $0
        sub(/^.*\*\*\* */, "", how)
        sub(/  +/, ", ", how)
        count = told = 0
    }
    next
}
name != "" && NF > 0 {
    all[count++] = $0
    if ($0 ~ /\.(c|cc|cpp|cu|cuh|h|sh|py):[0-9]+(:[0-9]+)?: / || $0 ~ /^ *FAIL(ED)?([ :]|$)/ ||
        $0 ~ /^([A-Za-z_.]*(Error|Exception|Expired)|libshd\.errors\.[A-Za-z]+)(: |$)/ ||
        $0 ~ /(ERROR|WARNING): [A-Za-z]*Sanitizer|^SUMMARY: /)
        why[told++] = $0
}
END { ends_test() }
