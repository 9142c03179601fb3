_gpipe() {
    local line="${COMP_LINE:0:COMP_POINT}" breaks="${COMP_WORDBREAKS//[^=:]/}"
    local word="${line##* }"
    mapfile -t COMPREPLY < <(COMP_LINE="$line" gpipe -sc query=bash 2>/dev/null)
    # Where bash takes = and : for the end of a word, it replaces only what comes after them.
    if [[ $breaks && $word == *[$breaks]* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[$breaks]}"}"}")
    fi
    if [[ ${COMPREPLY[0]} != *[=/] ]]; then
        compopt +o nospace
    fi
}
complete -o nospace -o default -F _gpipe gpipe
